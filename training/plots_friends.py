"""Plots about friends and feelings: sharing, fear, kindness, learning, quarrels.

Owns the text of these plots as data (see Plot in plot.py for the fields); stories.py
fills in the characters and tells them. There is no logic here.
"""

from __future__ import annotations

from plot import Plot

SHARE = Plot(
    themes=("sharing", "a hungry friend"),
    paragraphs=(
        (
            "{day}, {hero} had some {food}. It smelled [so good|wonderful|sweet]. {He} sat down "
            "{at_place} to eat it all by {himself}.",
            "?{weather}",
            "Then {a_fkind} named {friend} came by. {friend} looked [tired|cold] and hungry. "
            '"[May I have a bite|Could you share your {food} with me|Is there a little for me], '
            'please?" asked {friend}.',
        ),
        (
            '"No," said {hero}. "[It is all mine|I want to eat it myself|There is not enough]." '
            "{friend} [walked away slowly|said nothing and left|hung {fhis} head]. {Fhe} felt "
            "{sad}.",
            "{hero} took a bite, but the {food} did not taste good any more. [{He} kept thinking "
            "of {friend}.|Eating alone was no fun.|There was a heavy feeling inside {him}.]",
            "?{He} tried to [sing a song|look at the sky] and forget about it, but it did not "
            "help.",
        ),
        (
            'So {hero} jumped up and ran after {friend}. {He} found {fhim} {spot}. "I am sorry," '
            'said {hero}. "[Please come and eat with me|I was not kind|Half of it is for you]."',
            "{friend} [smiled|wiped {fhis} eyes|was surprised]. They sat down together and shared "
            "the {food}. [Now it tasted better than ever.|Every crumb was delicious.]",
            "[To say thank you|When they had finished], {friend} gave {hero} {a_obj}. {hero} felt "
            "{glad}.",
            "?[Sharing makes everything better.|From then on, {hero} always shared {his} "
            "food.|After that day, they ate together every week.]",
        ),
    ),
    facts=(
        ("What did {hero} have?|What did {hero} eat?", "{hero} had some {food}."),
        ("Who was hungry?|Who asked for food?", "{friend} was hungry."),
        ("Where did {hero} find {friend}?", "{hero} found {fhim} {spot}."),
        ("What did {friend} give {hero}?", "{friend} gave {hero} {a_obj}."),
        ("How did {friend} feel when {hero} said no?", "{friend} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

AFRAID = Plot(
    themes=("being brave", "being afraid"),
    picks={
        "fear": ("the dark", "thunder", "deep water", "loud noises", "high places", "spiders"),
        "trouble": (
            "was caught in a thorn bush",
            "had fallen into a deep hole",
            "was stuck in the mud",
            "had hurt {fhis} foot",
        ),
    },
    paragraphs=(
        (
            "There was just one problem. {hero} was afraid of {fear}. [{He} never told anyone "
            "about it.|Sometimes {his} friends laughed at {him}.|It made {him} feel {sad}.]",
            '{night}, {hero} heard a voice outside. "Help! Help!" It was {his} friend {friend}, '
            "{a_ftrait} {fkind}. [The voice came from far away.|The wind was howling.|It was "
            "late, and everyone else was asleep.]",
        ),
        (
            '{hero} [stood at the door and shook|hid under {his} blanket]. "[I cannot do it|I am '
            'too scared|What if something bad happens]," {he} said. {He} took one step, and then '
            "{he} went back.",
            '"Help!" called {friend} again. {hero} thought of {his} friend, all alone {at_place}. '
            '[{He} took a deep breath.|{He} closed {his} eyes and counted to three.|"I must be '
            'brave," {he} told {himself}.]',
            "{hero} took {a_obj} to [make {him} feel safe|bring {him} luck] and went out. Step by "
            "step, {he} walked to {place}.",
            "?{His} heart was beating fast, but {he} did not stop.",
        ),
        (
            'There {he} found {friend}, who {trouble}. ["You came!" cried {friend}.|"I knew you '
            'would come," said {friend}.] {hero} helped {fhim} and took {fhim} home.',
            '"[You are the bravest friend in the world, {hero}!|Were you not afraid, {hero}?]" '
            'said {friend}. "I was afraid," said {hero}, "but [you needed me|I came anyway]."',
            "They had some {food} and sat by the fire. {hero} felt {glad}.",
            "?[Being brave means doing the right thing, even when you are scared.|After that, "
            "{hero} was not so afraid of {fear}.]",
        ),
    ),
    facts=(
        ("What was {hero} afraid of?", "{hero} was afraid of {fear}."),
        ("Who called for help?|Who needed help?", "{friend} called for help."),
        ("Where was {friend}?", "{friend} was {at_place}."),
        ("What did {hero} take along?", "{hero} took {a_obj}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
        ("What did they eat?", "They had some {food}."),
    ),
)

LEARN = Plot(
    themes=("learning something new", "never giving up"),
    picks={
        "skill/skilled": (
            "whistle/whistled",
            "swim/swam",
            "skip stones/skipped stones",
            "dance/danced",
            "play the flute/played the flute",
            "ride a bicycle/rode a bicycle",
            "skate/skated",
            "sing/sang",
            "juggle/juggled",
        ),
        "mock": (
            "It is much too hard for you",
            "You will never learn it",
            "You are too small for that",
        ),
    },
    paragraphs=(
        (
            "More than anything, {hero} wanted to learn to {skill}. {His} friend {friend}, "
            "{a_ftrait} {fkind}, could do it [very well|with {fhis} eyes closed|better than "
            "anyone].",
            "{day}, {hero} went to {place} to try.",
            "?{weather}",
            "{He} tried once, and {he} tried twice, but [nothing happened|it went all wrong|it "
            'was no good at all]. "{mock}," said a crow on a fence. {hero} felt {sad}.',
        ),
        (
            "{hero} [wanted to give up|sat down {spot} and cried|went home and shut the door]. "
            'Then {friend} came to see {him}. "[I could not do it at first, either|Nobody can do '
            'it on the first day|It took me a whole year to learn it]," said {friend}. "[Let me '
            'show you|Let us try it together|Do it slowly, step by step]."',
            "So {hero} practised every [day|morning|evening]. [The first week was hard.|Sometimes "
            "{he} fell down, and sometimes {he} laughed at {himself}.|{friend} cheered for {him} "
            "every time.]",
            "?When {hero} was tired, {friend} gave {him} some {food}.",
        ),
        (
            "And then, [one evening|on the seventh day|one fine morning], it worked! {hero} "
            "{skilled} [all by {himself}|as if {he} had always known how|from morning to night]. "
            '"[I can do it|Look at me|I did it]!" {he} shouted.',
            "{friend} [clapped|jumped for joy|gave {him} {a_obj} as a prize]. Even the crow on "
            "the fence [was impressed|had to smile|said nothing].",
            '{hero} felt {glad}. [If you keep trying, hard things become easy.|"Thank you for '
            'believing in me," {he} said to {friend}.|The next day, {he} showed everyone what '
            "{he} had learned.]",
        ),
    ),
    facts=(
        ("What did {hero} want to learn?", "{hero} wanted to learn to {skill}."),
        ("Who helped {hero}?|Who taught {hero}?", "{friend} helped {hero}."),
        ("Where did {hero} go to try?", "{hero} went to {place}."),
        ("What did the crow say?", 'The crow said, "{mock}."'),
        ("How did {hero} feel when it went wrong?", "{hero} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

QUARREL = Plot(
    themes=("a quarrel", "two friends who fight"),
    picks={
        "rain": ("a big storm came up", "it began to rain very hard", "a cold fog came down"),
        "shelter": ("an old shed", "a small cave", "a hollow tree", "an empty barn"),
    },
    paragraphs=(
        (
            "{hero}'s best friend was {a_fkind} named {friend}. They did everything together. "
            "{day}, they found {a_obj} {at_place}.",
            '"[I saw it first|It is mine|Give it to me]!" said {hero}. "No, [I saw it first|it is '
            'mine|I found it]!" said {friend}. They pulled and they shouted. [Neither of them '
            "would let go.|Soon they were both angry.]",
            '"[You are not my friend any more|I will never play with you again]!" said {friend}. '
            "{Fhe} went away, and {hero} was left with the {thing}. {He} had won, but {he} felt "
            "{sad}.",
        ),
        (
            "{hero} tried to play with the {thing}. [It was no fun to play alone.|{He} soon grew "
            "tired of it.] {He} put it {spot} and looked at the sky.",
            '?"A {thing} cannot laugh at my jokes," said {hero}.',
            'Then {rain}. {hero} ran to {shelter} to [stay dry|hide]. It was dark inside. "[Who '
            'is there|Is somebody there]?" said a small voice. It was {friend}!',
            "For a while, nobody spoke. [Drip, drop, went the water.|The wind blew outside.] Then "
            'they both said at the same time, "I am sorry." They looked at each other and '
            "laughed.",
        ),
        (
            '"[You can have the {thing}|You may keep it]," said {hero}. "No, [we can share it|let '
            'us both have it]," said {friend}. "[One day it will be yours, and one day it will be '
            'mine|I would rather have you than {a_thing}]."',
            "When the sun came out, they [went home hand in hand|walked to {place2} to "
            "play|shared some {food}]. {hero} felt {glad}.",
            "?[A friend is better than any treasure.|They never fought about a thing "
            "again.|Saying sorry can be hard, but it is worth it.]",
        ),
    ),
    facts=(
        ("What did they find?|What did they fight about?", "They found {a_obj}."),
        ("Who was {hero}'s best friend?", "{hero}'s best friend was {friend}."),
        ("Where did they find the {thing}?", "They found it {at_place}."),
        ("Where did {hero} hide?", "{hero} ran to {shelter}."),
        ("How did {hero} feel after the fight?", "{hero} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

NEWCOMER = Plot(
    themes=("making a new friend", "someone new"),
    picks={
        "odd": (
            "spoke very softly",
            "wore a very big hat",
            "had come from far away",
            "never looked up",
            "had a funny way of walking",
        ),
    },
    paragraphs=(
        (
            "{day}, someone new came to {place}. It was {a_fkind} named {friend}, who {odd}. "
            "[Nobody knew what to say.|Nobody wanted to play with {fhim}.|The others only "
            "stared.]",
            "?{weather}",
            "{friend} sat all alone {spot} with {a_obj}. {Fhe} looked {sad}. {hero} watched "
            "{fhim} for a long time.",
        ),
        (
            '"[Come and play with us|Let us play without {friend}]," called the others to {hero}. '
            "{hero} did not know what to do. [{He} was a little shy.|What if {friend} did not "
            "like {him}?]",
            "?{hero} tried to wave, but {friend} did not see it.",
            'Then {he} walked over and sat down next to {friend}. "Hello," {he} said. "My name is '
            '{hero}. [That is a lovely {thing}|What a beautiful {thing}]. May I see it?"',
            '{friend} [blinked|looked up] in surprise. "[My grandfather gave it to me|I brought '
            'it from home|It helps me when I miss my home]," {fhe} said. "[Here, you can hold '
            'it.|Do you want to try it?]"',
        ),
        (
            "Soon {hero} and {friend} were [talking and laughing|telling each other "
            "stories|playing a new game]. One by one, the others came over, too. [{friend} knew "
            "the best games of all.|Everybody wanted to see the {obj}.]",
            'In the evening, they all ate some {food}. "Thank you for saying hello," said '
            '{friend}. "[It was the best thing that happened to me today|I am not lonely any '
            'more]."',
            "{hero} felt {glad}. [A small hello can start a big friendship.|{He} had made a new "
            "friend.|It only takes one kind word.]",
        ),
    ),
    facts=(
        ("Who was new?|Who came to {place}?", "{friend} was new."),
        ("What did {friend} have?", "{friend} had {a_obj}."),
        ("Where did {friend} sit?", "{friend} sat {spot}."),
        ("Who talked to {friend}?|Who was kind to {friend}?", "{hero} talked to {friend}."),
        ("How did {friend} look when {fhe} was alone?", "{friend} looked {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

PLOTS = (SHARE, AFRAID, LEARN, QUARREL, NEWCOMER)
