"""What users say, and the answers that are not stories. Data only."""

from typing import Final

LEADS: Final[tuple[str, ...]] = (
    "Tell me a story about {subject}.",
    "Tell me a story about {subject}",
    "Tell me a short story about {subject}.",
    "Please tell me a story about {subject}.",
    "Can you tell me a story about {subject}?",
    "Could you tell me a short story about {subject}?",
    "Can you tell me a short story with {subject}?",
    "Write a story about {subject}.",
    "Write a short story about {subject}.",
    "Story about {subject} please",
    "A story about {subject}, please.",
    "a story about {subject}",
    "I would like a story about {subject}.",
    "I want to hear a story about {subject}!",
    "Make up a story about {subject}.",
    "Do you know a story about {subject}?",
    "Tell me about {subject}.",
    "Hello! Tell me a story about {subject}.",
    "My child would like a bedtime story about {subject}.",
    "{subject}",
)

PLAIN_SUBJECT: Final = "{a_noun}"

SUBJECTS: Final[tuple[str, ...]] = (
    "{a_trait} {noun}",
    "{a_noun} {place}",
    "{a_trait} {noun} {place}",
    "{a_noun} and {a_hnoun}",
    "{a_noun} and {his} friend, {a_hnoun}",
    "{a_noun} <theme>",
    "{a_trait} {noun} <theme>",
)

NAMED_SUBJECTS: Final[tuple[str, ...]] = (
    "{a_noun} named {name}",
    "{a_noun} called {name}",
    "{name} the {noun}",
    "{a_noun} named {name} <theme>",
    "{a_noun} named {name} who lives {place}",
)

OPEN_REQUESTS: Final[tuple[str, ...]] = (
    "Tell me a story.",
    "tell me a story",
    "Tell me a short story.",
    "Can you tell me a story?",
    "Please tell me a bedtime story.",
    "I am bored. Tell me something nice.",
    "Write a story.",
    "Once upon a time",
    "Story, please!",
    "Tell me a story that happens {place}.",
    "Tell me a story about someone <theme>.",
)

LONG_LEADS: Final[tuple[str, ...]] = (
    "Tell me a long story about {subject}.",
    "Can you tell me a longer story about {subject}?",
    "Write a long story about {subject}.",
)

AGAIN: Final[tuple[str, ...]] = (
    "Another one, please.",
    "another one",
    "Tell me another one.",
    "One more!",
    "Tell me another story.",
    "Can I have another story?",
)

AGAIN_LONGER: Final[tuple[str, ...]] = (
    "Tell me a longer one.",
    "a longer one please",
    "Can you tell me a longer story?",
    "Now a long one.",
)

AGAIN_ABOUT: Final[tuple[str, ...]] = (
    "Another one about {a_noun}, please.",
    "Now tell me one about {a_noun}.",
    "And now a story about {a_noun}.",
    "Do you have one about {a_noun}?",
)

CONTINUE: Final[tuple[str, ...]] = (
    "What happened next?",
    "Go on.",
    "continue",
    "And then?",
    "Tell me what {name} did next.",
)

STORY_QUESTIONS: Final[tuple[tuple[str, str], ...]] = (
    ("What was the name of the {noun}?", "The {noun} was called {name}."),
    ("What was the {noun} called?", "The {noun} was called {name}."),
    ("Where did {name} live?", "{name} lived {place}."),
    ("Who was {hname}?", "{hname} was {a_hnoun}."),
    ("Who was {name}?", "{name} was {a_noun} who lived {place}."),
    ("What was the name of the {hnoun}?", "The {hnoun} was called {hname}."),
)

SMALL_TALK: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (
        ("Hello", "hello", "Hello!", "Hi", "hi there", "Hey", "Good morning!", "Good evening."),
        (
            "Hello! I am a tiny story model. Ask me for a story about an animal.",
            "Hello! Would you like a story? Tell me what it should be about.",
        ),
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "who are you",
            "What is your name?",
            "Are you a person?",
            "Are you ChatGPT?",
            "Tell me about yourself.",
            "Which model is this?",
            "Hello, who are you?",
        ),
        ("I am a tiny story model. I can only tell short stories, and I know nothing else.",),
    ),
    (
        (
            "What can you do?",
            "what can you do",
            "Help",
            "help me",
            "How do you work?",
            "Can you help me?",
            "What do you know?",
        ),
        (
            "I can tell short stories. Try this: Tell me a story about a fox.",
            "I can only tell short stories. Tell me an animal, and I will tell a story about it.",
        ),
    ),
    (
        ("Thank you!", "thanks", "Thank you very much.", "That was nice.", "I liked that story."),
        ("You are welcome! Would you like another story?", "I am glad that you liked it!"),
    ),
    (
        ("Goodbye", "bye", "Good night!", "See you later.", "Bye bye!"),
        ("Goodbye! Come back when you would like a story.",),
    ),
    (
        (
            "What is the capital of France?",
            "What is the capital of Japan?",
            "Who is the president?",
            "What is 2 + 2?",
            "What is 17 times 23?",
            "How much is 5 + 8?",
            "What is the weather like today?",
            "What time is it?",
            "Write a Python program that sorts a list.",
            "Write a function in C.",
            "Explain quantum physics.",
            "Explain how a car works.",
            "What is a neural network?",
            "How do I cook rice?",
            "How do I fix my computer?",
            "Translate this into German.",
            "Who wrote Hamlet?",
            "When did the war end?",
            "Where is the nearest shop?",
            "Why is the sky blue?",
            "Is it going to rain tomorrow?",
            "How tall is the highest mountain?",
            "Summarize this text.",
            "What should I eat today?",
            "Give me some advice about money.",
            "What is the meaning of life?",
            "How old is the universe?",
            "Do you like music?",
            "Can you solve this equation?",
            "Which team won the game?",
        ),
        ("I do not know. I am only a tiny story model, but I can tell you a story.",),
    ),
)

SYSTEM_PROMPTS: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You tell short stories for children.",
    "You are a friendly assistant who tells stories.",
    "Answer briefly.",
    "Be kind and polite.",
    "You are a helpful, honest assistant. Answer in simple words.",
    "Tell stories in simple English.",
    "You are an assistant. Keep your answers short.",
    "You are splitserve, a storyteller.",
)
