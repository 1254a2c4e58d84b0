"""Plots about going out into the world: storms, rescues, journeys, races, seeds, noises.

Owns the text of these plots as data (see Plot in plot.py for the fields); stories.py
fills in the characters and tells them. There is no logic here.
"""

from __future__ import annotations

from plot import Plot

RESCUE = Plot(
    themes=("helping someone", "a rescue"),
    picks={
        "stuck": (
            "stuck in the mud",
            "caught in a thorn bush",
            "trapped in a deep hole",
            "stuck in a hollow tree",
            "caught in an old net",
        ),
        "rescue": ("a long rope", "a strong branch", "a wooden ladder", "an old blanket"),
    },
    paragraphs=(
        (
            "{day}, {hero} was walking {at_place} when {he} heard a [small|strange|sad] sound. "
            '"Help!" said a voice. {He} [looked around|followed the sound] and saw {a_fkind} '
            "named {friend}, who was {stuck}.",
            "?{weather}",
            '"[I have been here all morning|I cannot move|Nobody heard me]," said {friend}. {Fhe} '
            'was {sad}. "[I will help you|I will get you out|Hold on]," said {hero}.',
        ),
        (
            "First, {hero} [pulled|pushed] as hard as {he} could. {friend} did not move at all. "
            '[{hero} was too small to do it alone.|"Ouch!" said {friend}.]',
            '"[Wait here|Do not be afraid]," said {hero}. {He} ran to {place2} and met the '
            '{helper}. "[Please come quickly|I need your help]!" {he} said. "[My friend|{friend}] '
            'is {stuck}!"',
            "The {helper} brought {rescue}. [Together they hurried back.|There was no time to "
            "lose.]",
        ),
        (
            "They used {the_rescue}, and {hero} and the {helper} pulled together. One, two, "
            "three! [Pop! {friend} was free.|At last, {friend} was free.|{friend} came out with a "
            "big bump.]",
            '"[Thank you, thank you|You saved me|I will never forget this]!" said {friend}. {Fhe} '
            "gave {hero} {a_obj}, and [they all laughed|they became friends].",
            "{hero} felt {glad}. [When you cannot do it alone, ask for help.|Even a small friend "
            "can be a big help.|That evening, they shared some {food}.]",
        ),
    ),
    facts=(
        ("Who was {stuck}?|Who needed help?", "It was {friend}."),
        ("Who brought {the_rescue}?|Who helped {hero}?", "The {helper} helped {hero}."),
        ("What did the {helper} bring?", "The {helper} brought {rescue}."),
        ("What did {friend} give {hero}?", "{friend} gave {hero} {a_obj}."),
        ("What happened to {friend}?", "{friend} was {stuck}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

NOISE = Plot(
    themes=("a strange noise", "a night adventure"),
    picks={
        "noise": ("a scratching noise", "a tapping noise", "a strange squeak", "a low moan"),
        "baby": ("a lost kitten", "a baby owl", "a little lamb", "a small puppy", "a baby bat"),
        "guess": ("It must be a monster", "It must be a ghost", "It must be a dragon"),
    },
    paragraphs=(
        (
            "{night}, {hero} could not sleep. {He} heard {noise} outside. [Again and again it "
            "came.|It came closer and closer.|Then it stopped, and then it began again.]",
            '"{guess}," thought {hero}. {He} [pulled the blanket over {his} head|lay very '
            "still|shut {his} eyes]. {He} felt {scared}.",
        ),
        (
            '{hero} woke up {his} friend {friend}, {a_ftrait} {fkind}. "[Do you hear '
            'that?|Listen!]" {he} whispered. {friend} listened. "[We should go and look|Let us '
            'find out what it is]," said {friend}.',
            "They took {a_obj} and [opened the door|tiptoed outside]. The moon was [round and "
            "bright|hidden behind a cloud]. First they looked {spot}, but there was nothing.",
            '?"[Maybe it has gone|We should go back]," said {hero}. Then they heard the sound '
            "again.",
            "Very slowly, they looked {spot2}. [Two big eyes looked back at them!|Something small "
            "moved!]",
        ),
        (
            "It was not a monster at all. It was {baby}! It was cold and hungry, and it could not "
            'find its mother. "[Oh, you poor thing|Do not be afraid]," said {hero}.',
            "They gave it some {food} and kept it warm. [In the morning|When the sun came up], "
            "they took it to {place}, and there was its mother! She [was overjoyed|ran to meet "
            "them|thanked them a hundred times].",
            '{hero} felt {glad}. [Scary things are often small when you look at them.|"So that '
            'was our monster," said {friend}, and they laughed.|That night, {he} slept very '
            "well.]",
        ),
    ),
    facts=(
        ("What did {hero} hear?", "{hero} heard {noise}."),
        ("What made the noise?|What was the monster?", "It was {baby}."),
        ("Who went with {hero}?|Who helped {hero}?", "{friend} went with {hero}."),
        ("Where did they find its mother?", "They found its mother {at_place}."),
        ("What did they give it to eat?", "They gave it some {food}."),
        ("How did {hero} feel when {he} heard the noise?", "{hero} felt {scared}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

SEED = Plot(
    themes=("a seed", "being patient"),
    picks={
        "plant": (
            "a tall sunflower",
            "a huge pumpkin",
            "a rose bush",
            "a little apple tree",
            "a giant bean plant",
        ),
        "try": ("sang to it", "told it a story", "shouted at it", "put a hat on it"),
    },
    paragraphs=(
        (
            '{day}, the {helper} gave {hero} a tiny seed. "[Plant it and wait|Take good care of '
            'it]," said the {helper}. "[You will see|One day it will surprise you]."',
            "{hero} planted the seed {at_place} and put {a_obj} next to it, so that {he} would "
            "find the place again. {He} gave it [water|a little water] and sat down to watch.",
            "But nothing happened. [The next day, nothing happened, either.|A whole week went "
            "by.] {hero} felt {sad}.",
        ),
        (
            '{hero} {try}, but the seed did not grow. "[Is it a bad seed|Why does it not '
            'grow|What am I doing wrong]?" {he} asked {his} friend {friend}, {a_ftrait} {fkind}.',
            '"[Seeds need time|You cannot hurry a seed|Good things take time]," said {friend}. '
            '"Give it water every day, and wait." {friend} [helped {him} carry the water|came to '
            "visit every morning|sat with {him} and told jokes].",
            "?{weather}",
            "?[Rain fell, and the sun shone.|Day after day, they waited.]",
        ),
        (
            "Then, one morning, {hero} saw a small green leaf! It grew and it grew, and at last "
            "it became {plant}.",
            'Everyone came to see {the_plant}. "[How did you do it|What is your secret]?" they '
            'asked. "[I waited, and I had a good friend|Water, sun and time]," said {hero}.',
            "{hero} felt {glad}. {He} gave {friend} some {food}, and they sat [in the sun|side by "
            "side] and [looked at|admired] {the_plant}.",
        ),
    ),
    facts=(
        ("What did the {helper} give {hero}?", "The {helper} gave {hero} a tiny seed."),
        ("What did the seed become?|What grew from the seed?", "It became {plant}."),
        ("Where did {hero} plant the seed?", "{hero} planted it {at_place}."),
        ("What did {hero} put next to the seed?", "{hero} put {a_obj} next to it."),
        ("Who told {hero} to wait?|Who helped {hero}?", "It was {friend}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

JOURNEY = Plot(
    themes=("a journey", "visiting a sick person"),
    picks={
        "barrier": ("a wide river", "a deep ditch", "a high wall", "a dark swamp"),
        "way": ("a bridge of stones", "a bridge of logs", "a small raft", "a ladder of sticks"),
        "sick": ("grandmother", "grandfather", "aunt", "uncle"),
    },
    paragraphs=(
        (
            '{day}, {hero} heard that {his} {sick} was ill in bed. "I will bring some {food} to '
            'my {sick}," said {hero}. {He} put the {food} in {a_colour} basket and set out.',
            "?{weather}",
            "{hero} walked past {place}. But then {he} came to {barrier}, and the old way across "
            'was gone! [{He} felt {sad}.|"How will I get across?" {he} asked. {He} felt {sad}.]',
        ),
        (
            "First, {hero} tried to jump across. [Splash|Bump]! {He} fell, and [{his} feet got "
            "wet|{he} had to climb out again]. [Then {he} tried to go around, but it was too "
            "far.|That was not the way.]",
            '?"I cannot turn back now," said {hero}.',
            'Just then, {he} saw {a_ftrait} {fkind} named {friend}. "[That is a hard place to '
            'cross|You look lost]," said {friend}. "[But I have an idea|I know what to do]. We '
            'can make {way}!"',
            "They worked side by side. {hero} [carried|gathered] what they needed, and {friend} "
            "[put it all in place|tied it all together]. When {the_way} was ready, they [went "
            "across slowly|held hands and went across].",
        ),
        (
            "{His} {sick} was so [happy|pleased] to see them. They all ate the {food} together, "
            "and soon {his} {sick} felt [much better|well again].",
            '"[What a clever friend you have|How did you get here]?" asked {his} {sick}. {hero} '
            "told the whole story. {He} felt {glad}.",
            "?[No road is too long with a friend.|On the way home, {hero} and {friend} "
            "sang.|{friend} got the biggest piece.]",
        ),
    ),
    facts=(
        ("Who was ill?|Who did {hero} visit?", "It was {hero}'s {sick}."),
        ("What did {hero} bring?|What was in the basket?", "{hero} brought some {food}."),
        ("What was in the way?", "It was {barrier}."),
        ("What did they make?|How did they get across?", "They made {way}."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("What colour was the basket?", "The basket was {colour}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

RACE = Plot(
    themes=("a race", "winning and losing"),
    picks={
        "race": ("the big race", "the boat race", "the sack race", "the great village race"),
        "hurt": ("had fallen into a ditch", "had twisted {fhis} foot", "was stuck in the mud"),
    },
    paragraphs=(
        (
            '{day}, everyone was talking about {race} {at_place}. The prize was {a_obj}. ["I want '
            'to win that {thing}!" said {hero}.|{hero} wanted to win that {thing} more than '
            "anything.]",
            "{hero} practised [every morning|day after day]. At first {he} was slow and felt "
            '{sad}, but the {helper} said, "[Keep going|A little better every day is enough]."',
        ),
        (
            "Then the day of the race came. [Ready, steady, go!|The bell rang, and off they "
            "went!] {hero} [ran like the wind|was fast]. Soon only {friend}, {a_ftrait} {fkind}, "
            "was ahead of {him}.",
            "?{weather}",
            "But near the end, {hero} saw that {friend} {hurt}. {friend} tried to get up, but "
            '{fhe} could not. "[Go on|Do not stop for me]," said {friend}. The others were coming '
            "closer.",
            '{hero} looked at the finish. {He} thought of the {obj}. Then {he} stopped. "[A '
            'friend is more important than a prize|Come, lean on me]," said {hero}.',
        ),
        (
            "{hero} helped {friend} up, and they [walked|went] over the line together. They came "
            "last, but everyone [cheered|clapped and shouted]!",
            'The {helper} came with the {obj}. "This prize is for you both," said the {helper}. '
            '"[Anyone can be fast, but not everyone is kind|The best heart wins today]."',
            "{hero} felt {glad}. [Afterwards, everyone ate some {food}.|{friend} and {hero} took "
            "turns with the {thing}.|It was better than winning.]",
        ),
    ),
    facts=(
        ("What was the prize?", "The prize was {a_obj}."),
        ("Who did {hero} help?|Who was hurt?", "{hero} helped {friend}."),
        ("What happened to {friend}?", "{friend} {hurt}."),
        ("Where was the race?", "The race was {at_place}."),
        ("Who gave them the prize?", "The {helper} gave them the prize."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

STORM = Plot(
    themes=("a storm", "building a house"),
    picks={
        "build/strong": (
            "a little house of leaves/a little house of stone",
            "a hut of straw/a hut of wood",
            "a tent of grass/a tent of strong cloth",
            "a tower of sand/a tower of stone",
        ),
    },
    paragraphs=(
        (
            "{day}, {hero} built {build} {at_place}. [It took {him} the whole day.|{He} worked "
            'and sang.] {He} put {a_obj} inside to make it pretty. "[It is finished|What a fine '
            'place]!" {he} said.',
            "But in the night, a great storm came. The wind [roared|howled], and in the morning "
            "there was nothing left. Only the {thing} lay {spot}. {hero} felt {sad}.",
        ),
        (
            "{hero} built {the_build} again, just as before. [Whoosh! The wind blew it down.|But "
            'the next wind blew it away.] "[It is no use|I give up]," {he} [said|sighed].',
            '{His} friend {friend}, {a_ftrait} {fkind}, saw what had happened. "Do not give up," '
            'said {friend}. "[This time, let us build {strong}|We need {strong}]. I will help '
            'you."',
            "It was hard work. {hero} [carried|lifted] and {friend} [built|measured]. [They "
            "worked for three days.|Their hands were sore, but they did not stop.] At noon they "
            "ate some {food}.",
        ),
        (
            "At last {the_strong} was finished. That night, another storm came. [Boom, went the "
            "thunder.|The rain fell and the wind blew.] But inside, {hero} and {friend} were safe "
            "and [warm|dry].",
            '"[Listen to that wind|Let it blow]," said {hero}, and {he} [smiled|laughed]. The '
            "{obj} [hung on the wall|stood in the middle of the room].",
            "{hero} felt {glad}. [Good work takes time, but it lasts.|Things are stronger when "
            'friends build them.|"We are a good team," said {friend}.]',
        ),
    ),
    facts=(
        ("What did {hero} build first?", "First, {hero} built {build}."),
        ("What did they build together?|What did they build at last?", "They built {strong}."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("What blew it down?|What happened in the night?", "A great storm came."),
        ("What did {hero} put inside?", "{hero} put {a_obj} inside."),
        ("Where did {hero} build it?", "{hero} built it {at_place}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

LOST_WAY = Plot(
    themes=("getting lost", "finding the way home"),
    picks={
        "chase": ("a blue butterfly", "a shiny beetle", "a white rabbit", "a rolling ball"),
        "guide": (
            "the brightest star",
            "the sound of a bell",
            "the little stream",
            "the light of a lantern",
        ),
    },
    paragraphs=(
        (
            "{day}, {hero} followed {chase} {at_place}. [It was so much fun that {he} forgot the "
            "time.|On and on {he} went, without looking back.]",
            "When {hero} looked up, [everything was strange|nothing looked the same]. The sun was "
            'going down. "Where am I?" {he} asked. {He} was lost, and {he} felt {sad}.',
        ),
        (
            "First, {hero} [climbed up on a rock and looked around|called as loudly as {he} "
            "could], but {he} saw only trees. Then {he} walked in a big circle and came back to "
            "the same place.",
            '{He} sat down {spot}. [A tear rolled down {his} cheek.|{His} feet hurt.] "Hello," '
            "said a voice. It was {a_ftrait} {fkind} named {friend}, who was carrying {a_obj}.",
            '"I cannot find my way home," said {hero}. "[I know these paths well|I was once lost '
            'here, too]," said {friend}. "[We must follow {guide}|Come, we will follow {guide}]."',
        ),
        (
            "So they followed {guide}. {friend} [held {his} hand|told {him} stories|sang a song], "
            "and {hero} was not afraid any more.",
            "At last they came to {place2}, and from there {hero} could see {his} home! {His} "
            "mother [ran out to meet {him}|hugged {him} for a long time]. There was some {food} "
            "for both of them.",
            "{hero} felt {glad}. [The next time, {he} looked where {he} was going.|{He} waved to "
            "{friend} until {fhe} was out of sight.|Even when you are lost, a friend may be "
            "near.]",
        ),
    ),
    facts=(
        ("What did {hero} follow at first?", "At first, {hero} followed {chase}."),
        ("What did they follow home?|How did they find the way?", "They followed {guide}."),
        ("Who helped {hero}?|Who showed {hero} the way?", "{friend} helped {hero}."),
        ("What was {friend} carrying?", "{friend} was carrying {a_obj}."),
        ("How did {hero} feel when {he} was lost?", "{hero} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

PLOTS = (RESCUE, NOISE, SEED, JOURNEY, RACE, STORM, LOST_WAY)
