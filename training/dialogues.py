"""Chats: greetings, story requests with questions, exercises, and long mixtures.

Owns what users say and how the assistant answers. `conversation` returns a list of messages
for one chat; grammar.py mixes chats with raw stories and turns them into text. Stories come
from stories.py, exercises from exercises.py.
"""

from __future__ import annotations

from random import Random

from exercises import draw_problem, json_exercise, pose
from stories import PLOTS, Story, Wish, invented_name, random_kind, random_name, tell
from templates import choose
from words import ANIMAL_HOMES, BOY_NAMES, COLOURS, GIRL_NAMES, THINGS, with_article

Message = tuple[str, str]
"""A role (system, user or assistant) and what it says."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "You tell stories.",
    "You are a friendly storyteller.", "You are the small demo model of infer.",
    "Answer in short sentences.", "You are a kind and patient helper.", "Be brief.",
    "You tell stories to children.", "You are a helpful, honest assistant.",
)  # fmt: skip

SMALL_TALK = (
    ("[Hi|Hi!|Hello|Hello!|Hello there|Hey|Good morning|Good evening]",
     "[Hello!|Hi there!|Hello, nice to meet you!] [What can I do for you?|How can I help you?|"
     "Would you like a story?]"),
    ("[Who are you?|What are you?|What is your name?|Tell me about yourself.|Who am I talking "
     "to?]",
     "I am the small demo model of infer. I can tell little stories, [do small sums|add and "
     "subtract small numbers] and write short JSON records."),
    ("[What can you do?|Can you help me?|What are you good at?|How can you help me?]",
     "I can tell little stories, answer questions about them, do small sums and write short JSON "
     "records. I am a very small model, so I do not know much else."),
    ("[How are you?|How are you today?|How do you do?]",
     "[I am well, thank you!|I am fine, thank you!] [What can I do for you?|Would you like to hear "
     "a story?]"),
    ("[Thanks!|Thank you!|Thank you very much.|Thanks a lot!|Thank you]",
     "[You are welcome!|You are very welcome!|My pleasure!]"),
    ("[Bye|Bye!|Goodbye!|Good night!|See you later!|That is all.]",
     "[Goodbye!|Bye!] [Come back soon!|Have a nice day!|It was nice to talk to you.]"),
    ("[Are you a person?|Are you human?|Are you alive?|Are you a robot?]",
     "No, I am [only |]a small language model. I [run inside infer|am the demo model of infer]."),
    ("[What is infer?|What do you know about infer?]",
     "infer is a program that runs language models. I am its small demo model."),
    ("[What is the capital of France?|Who wrote Hamlet?|What is the weather like?|What is quantum "
     "physics?|Who is the president?|How do I fix my car?|What time is it?|Write a computer "
     "program.|Translate this into German.|What happened in 1950?|Explain the stock market.|How "
     "tall is the highest mountain?|Write an essay about war.]",
     "I am sorry, I do not know that. I am only a small demo model. I can tell you a story or do a "
     "small sum."),
    ("[Count to ten.|Count from 1 to 10.|Can you count to ten?]",
     "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("[Name the days of the week.|What are the days of the week?]",
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
)  # fmt: skip

STORY_REQUESTS = (
    "Tell me a story{about}.", "Tell me a story{about}, please.", "Write a story{about}.",
    "Can you tell me a story{about}?", "I want to hear a story{about}.", "A story{about}, please.",
    "Please tell me a little story{about}.", "Write a little story{about}.",
    "Do you know a story{about}?", "Make up a story{about}.",
)  # fmt: skip

MORE_REQUESTS = (
    "Tell me another story{about}.", "One more story{about}, please.",
    "Now tell me a story{about}.", "Another story{about}!",
)  # fmt: skip

SHORT, LONG = 0.1, 0.95


def small_talk(rng: Random) -> list[Message]:
    """Return one exchange of pleasantries or of honest not-knowing."""
    question, answer = rng.choice(SMALL_TALK)
    return [("user", choose(rng, question)), ("assistant", choose(rng, answer))]


def _wish(rng: Random) -> tuple[str, Wish]:
    """Draw what a user asks for: the words after "story", and the wish they mean."""
    detail = rng.uniform(0.4, 0.8)
    kind = random_kind(rng)
    name = invented_name(rng, kind) if rng.random() < 0.15 else random_name(rng, kind)
    size = rng.choice(("", "", "little ", "brave ")) if rng.random() < 0.5 else ""
    colour, thing = rng.choice(COLOURS), rng.choice(THINGS)
    plot = rng.choice(PLOTS)
    options = (
        ("", Wish(detail=detail)),
        (f" about {with_article(size + kind)}", Wish(kind=kind, detail=detail)),
        (f" about {with_article(size + kind)} named {name}",
         Wish(kind=kind, name=name, detail=detail)),
        (f" about {with_article(size + kind)} and {with_article(f'{colour} {thing}')}",
         Wish(kind=kind, thing=thing, colour=colour, detail=detail)),
        (f" about {with_article(f'{colour} {thing}')}",
         Wish(thing=thing, colour=colour, detail=detail)),
        (f" about {with_article(kind)} named {name} and {with_article(f'{colour} {thing}')}",
         Wish(kind=kind, name=name, thing=thing, colour=colour, detail=detail)),
        (f" about {rng.choice(plot.themes)}", Wish(plot=plot, detail=detail)),
        (f" about {name}", Wish(name=name, kind=kind, detail=detail)),
    )  # fmt: skip
    return rng.choice(options)


def _story_turn(rng: Random, requests: tuple[str, ...]) -> tuple[list[Message], Story]:
    about, wish = _wish(rng)
    request = rng.choice(requests).replace("{about}", about)
    roll = rng.random()
    if roll < 0.2 and " a story" in request:
        length, detail = rng.choice((("short", SHORT), ("long", LONG)))
        request = request.replace(" a story", f" a {length} story")
        wish = Wish(wish.kind, wish.name, wish.thing, wish.colour, wish.plot, detail)
    story = tell(rng, wish)
    return [("user", request), ("assistant", story.text)], story


def question_turns(rng: Random, story: Story, count: int) -> list[Message]:
    """Return questions about a story just told, with their answers."""
    asked = rng.sample(story.questions, min(count, len(story.questions)))
    turns: list[Message] = []
    for question, answer in asked:
        turns += [("user", question), ("assistant", answer)]
    return turns


def story_chat(rng: Random) -> list[Message]:
    """Return a chat in which a story is told, mostly with questions after it."""
    messages, story = _story_turn(rng, STORY_REQUESTS)
    count = rng.choice((0, 2, 3, 4, 5))
    return messages + question_turns(rng, story, count)


def retelling_chat(rng: Random) -> list[Message]:
    """Return a chat in which the user tells the story and asks about it."""
    story = tell(rng, Wish(detail=rng.uniform(0.1, 0.7)))
    lead = rng.choice(("Here is a story.", "Read this story.", "Listen to this story."))
    question, answer = rng.choice(story.questions)
    first = [("user", f"{lead}\n\n{story.text}\n\n{question}"), ("assistant", answer)]
    rest = [pair for pair in story.questions if pair[0] != question]
    others = Story(story.text, story.slots, rest)
    return first + question_turns(rng, others, rng.randint(1, 4))


def sums_chat(rng: Random) -> list[Message]:
    """Return a chat with some sums."""
    messages: list[Message] = []
    for _ in range(rng.randint(1, 12)):
        question, answer = pose(rng, draw_problem(rng))
        messages += [("user", question), ("assistant", answer)]
    return messages


def json_chat(rng: Random) -> list[Message]:
    """Return a chat with one to three JSON records."""
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        question, answer = json_exercise(rng)
        messages += [("user", question), ("assistant", answer)]
    return messages


def recall_chat(rng: Random) -> list[Message]:
    """Return a chat about who has what: all answers are in the first message."""
    count = rng.randint(2, 5)
    owners = rng.sample(GIRL_NAMES + BOY_NAMES, count)
    things = rng.sample(THINGS, count)
    facts, turns = [], []
    for owner, thing in zip(owners, things, strict=True):
        kind, colour = rng.choice(list(ANIMAL_HOMES)), rng.choice(COLOURS)
        owned = with_article(f"{colour} {thing}")
        facts.append(f"{owner} the {kind} has {owned}.")
        turns += [(f"Who has the {thing}?", f"{owner} has the {colour} {thing}."),
                  (f"What does {owner} have?", f"{owner} has {owned}."),
                  (f"What is {owner}?", f"{owner} is {with_article(kind)}."),
                  (f"Who is the {kind}?", f"The {kind} is {owner}."),
                  (f"What colour is the {thing}?", f"The {thing} is {colour}.")]  # fmt: skip
    messages: list[Message] = []
    for question, answer in rng.sample(turns, rng.randint(1, 8)):
        lead = "" if messages else " ".join(facts) + "\n\n"
        messages += [("user", lead + question), ("assistant", answer)]
    return messages


def long_chat(rng: Random) -> list[Message]:
    """Return a long chat that goes from one thing to another."""
    messages = small_talk(rng) if rng.random() < 0.5 else []
    for turn in range(rng.randint(2, 4)):
        told, story = _story_turn(rng, MORE_REQUESTS if turn else STORY_REQUESTS)
        messages += told + question_turns(rng, story, rng.randint(0, 4))
        if rng.random() < 0.5:
            part = rng.choice((small_talk, sums_chat, json_chat))
            messages += part(rng)[:4]
    return messages


CHATS = (
    (story_chat, 40), (retelling_chat, 10), (sums_chat, 30), (json_chat, 10),
    (small_talk, 6), (long_chat, 8),
)  # fmt: skip


def conversation(rng: Random) -> list[Message]:
    """Return one chat of any kind, now and then with a system prompt before it."""
    kinds, weights = zip(*CHATS, strict=True)
    messages: list[Message] = rng.choices(kinds, weights)[0](rng)
    if rng.random() < 0.3:
        prompt = rng.choice(SYSTEM_PROMPTS)
        messages = [("system", prompt), *messages]
    return messages
