"""Story shapes in which the hero or the helper needs help. Data only; `plot` explains the slots."""

from typing import Final

from bundled_model.plot import Plot

LOST: Final[Plot] = Plot(
    name="lost",
    themes=("who lost {a_object}", "who lost {a_color} {object}"),
    beats=(
        (
            "One day, {name} lost {his} {color} {object}.",
            "One morning, {name} woke up and {his} {color} {object} was gone.",
            "One windy day, the {noun} could not find {his} {color} {object} anywhere.",
        ),
        (
            "{He} looked {place} and {search}, but the {object} was not there.",
            "{He} searched {search}, but {he} did not find the {object}.",
            '"Where is my {object}?" cried {name}.',
        ),
        (
            "Then {he} met {a_hnoun} named {hname}.",
            "Soon {a_hnoun} named {hname} came by.",
            "{A_htrait} {hnoun} named {hname} heard {him} crying.",
        ),
        (
            '"Do not worry," said {hname}. "I will help you look."',
            '"I can help you find it," said the {hnoun}.',
            '{hname} said, "Two can look better than one."',
        ),
        (
            "Together they found the {color} {object} {search2}.",
            "They looked everywhere, and at last they found the {object} {search2}.",
            "The {hnoun} looked {search2}, and there was the {color} {object}.",
        ),
        (
            "{name} was so happy that {he} hugged {hname}.",
            'The {noun} laughed with joy. "Thank you, {hname}!" {he} said.',
            "{name} thanked {hname} and shared some {food} with {hhim}.",
        ),
    ),
    lessons=(
        "{name} learned that it is easier to look with a friend.",
        "After that, the {noun} always kept the {object} in a safe place.",
    ),
)

STORM: Final[Plot] = Plot(
    name="storm",
    themes=("in a storm", "who lost {his} home in a storm"),
    beats=(
        (
            "One evening, a big storm came, and the wind blew the roof off the home of {name}.",
            "One night, the rain fell so hard that the home of {name} was full of water.",
            "One winter day, the snow was so deep that the {noun} could not get home.",
        ),
        (
            "{name} was cold and wet, and {he} did not know where to go.",
            "The poor {noun} was very cold.",
        ),
        (
            "Then {he} saw a light. It was the home of {hname} the {hnoun}.",
            "{He} knocked on the door of {a_hnoun} named {hname}.",
        ),
        (
            '"Come in," said {hname}. "You can stay here and eat some {food}."',
            '"You are all wet!" said the {hnoun}. "Come in and have some {food}."',
        ),
        (
            "They sat by the fire and told stories until the storm was over.",
            "All night they sat by the fire, ate {food} and played {game}.",
        ),
        (
            "In the morning, {hname} helped {name} to fix {his} home.",
            "When the sun came out, the {hnoun} helped the {noun} to build a new home.",
        ),
    ),
    lessons=(
        "{name} learned that a good neighbor is better than a strong roof.",
        "After that, the {noun} was not afraid of bad weather.",
    ),
)

BUILD: Final[Plot] = Plot(
    name="build",
    themes=("who wanted to build {project}", "who built {project}"),
    beats=(
        (
            "One day, {name} wanted to build {project}.",
            "The {noun} had a big dream. {He} wanted to build {project}.",
        ),
        (
            "{He} worked all morning, but everything fell down.",
            "{He} tried and tried, but it broke three times.",
            "{He} worked very hard, but it was too much work for one {noun}.",
        ),
        (
            "{A_hnoun} named {hname} was watching.",
            "Then {a_htrait} {hnoun} named {hname} walked by.",
        ),
        (
            '"Why do you not ask for help?" said {hname}.',
            '"Let me hold the wood for you," said the {hnoun}.',
            '{hname} said, "I know how to do it. Let us work together."',
        ),
        (
            "So they worked together, and by evening they had built {project}.",
            "The two of them worked for three days, and then it was ready.",
        ),
        (
            "They sat down and ate {food}, and {name} was very proud.",
            '"We did it!" said the {noun}, and they both danced.',
        ),
    ),
    lessons=(
        "{name} learned that it is good to ask for help.",
        "Many hands make light work, thought the {noun}.",
    ),
)

FEAR: Final[Plot] = Plot(
    name="fear",
    themes=("who was afraid of {fear}",),
    beats=(
        (
            "{name} had a secret. {He} was afraid of {fear}.",
            "The {noun} was afraid of {fear}, and everybody laughed at {him}.",
        ),
        (
            "One day, {his} friend {hname} the {hnoun} was in trouble.",
            "One night, {a_hnoun} named {hname} called for help.",
        ),
        (
            '"Help me, {name}!" cried {hname}. "I am stuck {search}!"',
            "The {hnoun} was stuck {search} and could not get out.",
        ),
        (
            "{name} was shaking, but {he} took a deep breath.",
            "The {noun} thought about {fear}, and {his} heart beat fast.",
        ),
        (
            "Then {he} ran as fast as {he} could and pulled {hname} out.",
            "But {he} did not run away. {He} went to {hname} and saved {hhim}.",
        ),
        (
            '"You are the bravest {noun} I know," said {hname}.',
            '"Thank you," said the {hnoun}. "You were so brave!"',
        ),
    ),
    lessons=(
        "{name} learned that brave means to be afraid and to go on.",
        "After that, the {noun} was not afraid of {fear} any more.",
    ),
)

LEARN: Final[Plot] = Plot(
    name="learn",
    themes=("who learned to {skill}", "who wanted to {skill}"),
    beats=(
        (
            "{name} wanted to learn to {skill}, but {he} did not know how.",
            "More than anything, the {noun} wanted to {skill}.",
        ),
        (
            "{He} tried it alone, but it went wrong every time.",
            '"I will never learn it," said {name}, and {he} was sad.',
        ),
        (
            "One day, {he} met {a_hnoun} named {hname} who could {skill} very well.",
            "Then {he} heard of {a_htrait} {hnoun} named {hname}, the best teacher of all.",
        ),
        (
            '"Can you teach me?" asked {name}.',
            'The {noun} asked, "Will you show me how to {skill}?"',
        ),
        (
            '"Of course," said {hname}, "but you must try every day."',
            '"Yes," said the {hnoun}, "but first you must be patient."',
        ),
        (
            "{name} tried every day for a month, and each day {he} got a little better.",
            "Every morning {name} and {hname} worked together, and then they ate {food}.",
        ),
        (
            "At last, {he} could {skill} better than anybody {place}.",
            'In the end, the {noun} could {skill}. "I am proud of you," said {hname}.',
        ),
    ),
    lessons=(
        "{name} learned that small steps take you far.",
        "And the {noun} began to teach others to {skill}.",
    ),
)

TREASURE: Final[Plot] = Plot(
    name="treasure",
    themes=("who found {a_object}", "who found {a_color} {object}"),
    beats=(
        (
            "One day, {name} found {a_color} {object} {search}.",
            "One sunny morning, the {noun} saw {a_color} {object} {search}.",
        ),
        (
            '"How beautiful!" said {name}. "Whose {object} is this?"',
            "{He} wanted to keep it, but {he} knew that somebody had lost it.",
        ),
        (
            "So {he} asked everybody about the {object}.",
            "The {noun} went from door to door with the {object}.",
        ),
        (
            "At last {he} met {a_hnoun} named {hname} who was crying.",
            "In the evening {he} came to the home of {a_htrait} {hnoun} named {hname}.",
        ),
        (
            '"That is my {color} {object}!" cried {hname}. "I lost it last week."',
            '"You found my {object}!" said the {hnoun}. "My mother gave it to me."',
        ),
        (
            "{name} gave it back, and {hname} danced with joy.",
            "The {noun} gave the {object} to {hname}, and {hhe} gave {him} some {food}.",
        ),
    ),
    lessons=(
        "{name} learned that it feels good to be honest.",
        "The {noun} had no {object}, but {he} had a new friend.",
    ),
)
