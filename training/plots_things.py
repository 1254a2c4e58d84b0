"""Plots about things: lost, found, broken, wanted, made, eaten.

Owns the text of these plots as data (see Plot in plot.py for the fields); stories.py
fills in the characters and tells them. There is no logic here.
"""

from __future__ import annotations

from plot import Plot

BREAKABLE = (
    "clock", "drum", "whistle", "bell", "teapot", "flute", "puppet", "cup", "mirror", "necklace",
    "lantern", "kite", "bottle",
)  # fmt: skip
MAGICAL = (
    "lantern", "bottle", "bell", "shell", "ring", "coin", "stone", "teapot", "mirror", "box",
    "cup", "key", "compass",
)  # fmt: skip

LOST = Plot(
    themes=("something that gets lost", "losing something"),
    paragraphs=(
        (
            "{hero} had {a_obj}. [It was {his} favourite thing in the whole world.|{His} "
            "grandmother had given it to {him}.|{He} [carried|took] it everywhere.]",
            "{day}, {hero} went to {place} to play.",
            "?{weather}",
            "When {he} [looked for|reached for|wanted to hold] the {thing}, it was gone! [{hero} "
            'felt very {sad}.|"Oh no, my {thing} is lost!" cried {hero}. {He} felt {sad}.|{hero} '
            "looked around, but the {obj} was not there. {He} was {sad}.]",
        ),
        (
            "First, {hero} [searched|looked] {spot}, but {he} found only [a snail|a sleepy "
            "beetle|some old nuts|a few dry leaves].",
            "?Then {he} [ran|walked] all the way home and back again. [It was no use.|There was "
            "still no {thing}.]",
            '[Just then|Soon|After a while], {a_fkind} named {friend} came along. "[What is '
            'wrong|Why do you look so {sad}|What happened], {hero}?" asked {friend}.',
            '"I have lost my {obj}," [said|answered|replied] {hero}. "[Do not worry|Do not cry|Do '
            'not give up]," said {friend}. "[We will find it together.|I will help you look for '
            'it.|Two pairs of eyes are better than one.]"',
        ),
        (
            "[So the two friends|Together, they|{hero} and {friend}] [looked|searched] everywhere "
            '{at_place}. At last, {friend} looked {spot2}, and there was the {obj}! "[Here it '
            'is|I found it|Look, here is your {thing}]!" shouted {friend}.',
            "{hero} [hugged|thanked] {friend} and held the {thing} tight. {He} felt {glad}.",
            "?They shared some {food} and [laughed until the sun went down|talked about their "
            "adventure|walked home side by side].",
            "From that day on, {hero} [always took good care of the {thing}|never forgot how "
            "{friend} had helped {him}|and {friend} were the best of friends].",
        ),
    ),
    facts=(
        ("What did {hero} lose?", "{hero} lost {a_obj}."),
        ("Who helped {hero}?", "{friend} helped {hero}."),
        ("Where was the {thing}?|Where did {friend} find the {thing}?", "It was {spot2}."),
        ("Where did {hero} lose the {thing}?", "{hero} lost it {at_place}."),
        ("How did {hero} feel when the {thing} was gone?", "{hero} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
        ("What colour was the {thing}?", "The {thing} was {colour}."),
        ("Where did {hero} look first?", "First, {hero} looked {spot}."),
    ),
)

FOUND = Plot(
    themes=("finding something", "telling the truth"),
    paragraphs=(
        (
            "{day}, {hero} was [walking|playing] {at_place}.",
            "?{weather}",
            'Suddenly {he} saw something [bright|strange|small] {spot}. It was {a_obj}! ["How '
            'pretty!" said {hero}.|"Now it is mine!" said {hero}.|{hero} had never seen such a '
            "beautiful {thing}.]",
        ),
        (
            "{hero} wanted to keep the {thing}. [{He} put it in {his} bag and skipped along the "
            "path.|{He} held it close and danced in a circle.|{He} took it home and put it under "
            "{his} bed.]",
            "But [soon|later that day|on the way home], {hero} met {a_fkind} named {friend}. "
            "{friend} was [crying|looking at the ground|sitting all alone] and felt very {sad}.",
            '"What is wrong?" asked {hero}. "I lost my {obj}," said {friend}. "[My mother made it '
            'for me.|I have had it since I was very small.|I looked for it all day.]"',
        ),
        (
            "{hero} [was quiet for a moment|thought about it for a while|looked down]. {He} "
            "[liked the {thing} very much|wanted to keep it so badly], but {he} knew what was "
            "right.",
            '"[Here is your {thing}|I found it {spot}|Please take it]," said {hero}. "It belongs '
            'to you." {friend} [jumped for joy|could hardly believe it|gave a big smile].',
            "[To say thank you|As a thank you], {friend} gave {hero} some {food}. [It tasted "
            "wonderful.|They ate it together under a tree.]",
            "That night, {hero} [had no {thing}|went to bed without the {thing}], but {he} had a "
            "new friend, and {he} felt {glad}.",
        ),
    ),
    facts=(
        ("What did {hero} find?", "{hero} found {a_obj}."),
        ("Where did {hero} find the {thing}?|Where was the {thing}?", "{hero} found it {spot}."),
        ("Who had lost the {thing}?|Who did the {thing} belong to?", "It belonged to {friend}."),
        ("What did {friend} give {hero}?", "{friend} gave {hero} some {food}."),
        ("How did {friend} feel when {hero} met {fhim}?", "{friend} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
        ("What colour was the {thing}?", "The {thing} was {colour}."),
    ),
)

BROKEN = Plot(
    themes=("something that gets broken", "a mistake"),
    things=BREAKABLE,
    picks={
        "tool": ("some strong glue", "a needle and thread", "a little hammer", "a piece of wire"),
        "bad": ("some mud", "a blade of grass", "a sticky leaf", "a bit of old string"),
    },
    paragraphs=(
        (
            "{hero} had a good friend, {a_fkind} named {friend}. {friend} had {a_obj} that {fhe} "
            "loved [very much|more than anything].",
            "{day}, {hero} [borrowed|asked to borrow] the {thing} and took it to {place}.",
            "But {he} [tripped over a root|slipped on a wet stone|was running too fast], and the "
            "{thing} fell to the ground. Crack! It was broken.",
            '{hero} felt {sad}. "[What will {friend} say|What have I done|How can I tell '
            '{friend}]?" {he} [whispered|asked {himself}].',
        ),
        (
            "[First|At first], {hero} tried to mend the {thing} with {bad}. [It did not work.|It "
            "held for a moment, and then it fell apart again.|That only made it worse.]",
            "?{hero} wanted to hide the {thing} {spot} and say nothing. But that did not feel "
            "right.",
            "Then {he} [went to see|ran to|visited] the {helper}, who knew how to mend things. "
            '"[Can you help me|Please help me]," said {hero}. "I broke the {thing}, and it is not '
            'mine."',
            'The {helper} [nodded kindly|smiled|looked at it closely]. "[Everyone makes '
            'mistakes|Anyone can drop a {thing}]," said the {helper}. "I have {tool}. Let us mend '
            'it together."',
        ),
        (
            "They worked [all afternoon|for an hour|until the sun was low], and soon the {thing} "
            "was as good as new.",
            '{hero} took the {thing} back to {friend} and told {fhim} the truth. "I am sorry," '
            'said {hero}. "I broke it, but the {helper} helped me to mend it."',
            "{friend} [was quiet for a moment, and then {fhe} smiled|gave {hero} a hug|laughed]. "
            '"[Thank you for telling me|I am not angry|You are a true friend]," said {friend}.',
            "{hero} felt {glad}. [The truth is never as scary as a secret.|After that, {he} was "
            "always careful with things that {he} borrowed.|It is always best to tell the truth.]",
        ),
    ),
    facts=(
        ("What did {hero} break?", "{hero} broke {a_obj}."),
        ("Who owned the {thing}?|Whose {thing} was it?", "It belonged to {friend}."),
        ("Who helped {hero} mend the {thing}?|Who helped {hero}?", "The {helper} helped {hero}."),
        ("What did they mend the {thing} with?", "They mended it with {tool}."),
        ("What did {hero} try first?", "First, {hero} tried to mend it with {bad}."),
        ("How did {hero} feel when the {thing} broke?", "{hero} felt {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

GIFT = Plot(
    themes=("a birthday", "a present"),
    picks={
        "made": (
            "a necklace of shells",
            "a crown of daisies",
            "a little wooden boat",
            "a painted stone",
            "a warm woolly hat",
            "a paper star",
            "a song",
        ),
    },
    paragraphs=(
        (
            "{day}, {hero} [remembered something|looked at the calendar|woke up early]. It was "
            "the birthday of {his} best friend, {a_fkind} named {friend}!",
            "{hero} wanted to give {friend} {a_obj}, because {friend} had always [wanted|wished "
            "for] one. {He} went to [the market|the little shop], but the {thing} cost too much. "
            "[{hero} had only one small coin.|{His} pockets were empty.]",
            '{hero} felt {sad}. "[I have nothing to give|A birthday needs a present]," {he} '
            "[said|sighed].",
        ),
        (
            'On the way home, {hero} met the {helper}. "[Why are you so {sad}|Why such a long '
            'face]?" asked the {helper}. {hero} told {hhim} everything.',
            '"[The best gifts are not bought|A gift does not have to cost money|The best gifts '
            'come from the heart]," said the {helper}. "Why do you not make something '
            '[yourself|for {friend}]?"',
            "{hero} went to {place} and thought hard.",
            "?{weather}",
            "Then {he} had an idea! {He} worked all day and made {made}.",
        ),
        (
            "In the evening, {hero} [knocked at the door|went to the party] and gave {friend} "
            '{the_made}. "[I made it for you|It is not much|Happy birthday, {friend}]," said '
            "{hero}.",
            "{friend}'s eyes [shone|grew wide]. \"[It is the best gift of all|I love it|Nobody "
            'has ever made me anything before]!" said {friend}.',
            "Everyone ate some {food} and [sang|danced|played games]. {hero} felt {glad}.",
            "?[A gift made with love is worth more than gold.|{friend} kept the gift for ever.]",
        ),
    ),
    facts=(
        ("Whose birthday was it?", "It was {friend}'s birthday."),
        ("What did {hero} make?|What did {hero} give {friend}?", "{hero} made {made}."),
        ("What did {hero} want to buy?", "{hero} wanted to buy {a_obj}."),
        ("Who gave {hero} advice?", "The {helper} gave {hero} advice."),
        ("What did they eat at the party?", "They ate some {food}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

THIEF = Plot(
    themes=("a mystery", "a thief"),
    picks={
        "clue": ("a trail of crumbs", "a line of small footprints", "a row of sticky paw prints"),
        "thief": (
            "a hungry little bird",
            "a tiny lost mouse",
            "a baby squirrel",
            "a thin grey cat",
        ),
    },
    paragraphs=(
        (
            "{day}, {hero} made some {food} for {his} friend {friend}, {a_ftrait} {fkind}. {He} "
            "put it by the window to cool and went to {place} to [pick flowers|fetch water|call "
            "{friend}].",
            'When {hero} came back, [half of the {food} was gone|the plate was empty]! "Who has '
            'eaten my {food}?" cried {hero}. {He} was {sad}.',
        ),
        (
            '{friend} came to the door. "[Did you eat it|Was it you], {friend}?" asked {hero}. '
            '"No, [I have only just come|it was not me]," said {friend}. "But [look|see here], '
            'there is {clue} on the floor!"',
            "{hero} and {friend} followed {the_clue} [out of the door and down the path|through "
            "the garden and over the wall|across the yard and past the well].",
            '?[They walked on the tips of their toes.|"Be very quiet," whispered {friend}.|They '
            "had to crawl under a fence.]",
            "At last they came to a dark place {spot}. Something was moving there! {hero} [took a "
            "deep breath|held {his} breath] and looked.",
        ),
        (
            'It was {thief}. "[I am sorry|Please do not be angry]," it said. "I was so hungry, '
            'and I had nothing to eat."',
            "{hero} [was not angry any more|felt sorry for it|looked at {friend}, and they both "
            'smiled]. "[Next time, just ask|You only had to ask]," said {hero}. "There is enough '
            'for everyone."',
            "So they all went back and made some more {food}. {hero} felt {glad}, [because food "
            "tastes better with friends|and so did {friend}|and the mystery was solved].",
        ),
    ),
    facts=(
        ("What did {hero} make?", "{hero} made some {food}."),
        ("Who ate the {food}?|Who was the thief?", "It was {thief}."),
        ("What did they follow?|What was on the floor?", "It was {clue}."),
        ("Who came to the door?|Who helped {hero}?", "It was {friend}."),
        ("How did {hero} feel when the {food} was gone?", "{hero} was {sad}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

WISH = Plot(
    themes=("a wish", "magic"),
    things=MAGICAL,
    picks={
        "wisher": ("a golden fish", "a tiny fairy", "a talking star", "a friendly ghost"),
        "badwish": (
            "a mountain of sweets",
            "a castle of gold",
            "a hundred toys",
            "a very tall hat",
        ),
    },
    paragraphs=(
        (
            "{day}, {hero} found {a_obj} {spot} {at_place}.",
            'When {he} [rubbed|touched|shook] it, {wisher} came out! "[Thank you for waking '
            'me|You have set me free]," said {the_wisher}. "You may have one wish."',
            "{hero} [could hardly speak|jumped up and down|was amazed]. {He} thought of "
            '{badwish}. ["What fun that would be!" {he} said.|It was very hard to choose.]',
        ),
        (
            "[Before {he} could answer|Just then], {hero} heard someone crying. It was {his} "
            "friend {friend}, {a_ftrait} {fkind}. {friend} had hurt {fhis} [leg|foot] and could "
            "not [walk|play] any more. {Fhe} felt {sad}.",
            "{hero} tried to make {friend} laugh, but it did not help. {He} tried to carry "
            "{fhim}, but {friend} was too heavy.",
            "{hero} looked at the {obj} and thought of {the_badwish} again. Then {he} [shook "
            "{his} head|smiled].",
        ),
        (
            '"[I know my wish|I wish for only one thing]," said {hero}. "Please make {friend} '
            'well again." There was a flash of {colour} light, and {friend} [stood up|jumped to '
            "{fhis} feet]!",
            '"[That was a good wish|You have a kind heart]," said {the_wisher}, and {hero} felt '
            "{glad}.",
            "{hero} and {friend} [ran home|raced to {place2}|danced all the way home] together. "
            "[{hero} never got {the_badwish}, but {he} was not sorry.|A friend is worth more than "
            "{badwish}.]",
        ),
    ),
    facts=(
        ("What did {hero} find?", "{hero} found {a_obj}."),
        ("Who came out of the {thing}?", "It was {wisher}."),
        ("What did {hero} wish for?", "{hero} wished that {friend} would be well again."),
        ("Who was hurt?|Who was crying?", "It was {friend}."),
        ("What did {hero} think of first?", "First, {hero} thought of {badwish}."),
        ("How did {hero} feel at the end?", "{hero} felt {glad}."),
    ),
)

PLOTS = (LOST, FOUND, BROKEN, GIFT, THIEF, WISH)
