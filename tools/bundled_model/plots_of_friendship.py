"""Story shapes in which two characters become friends. Data only; `plot` explains the slots."""

from typing import Final

from bundled_model.plot import Plot

FRIEND: Final[Plot] = Plot(
    name="friend",
    themes=("who was lonely", "who found a friend"),
    beats=(
        (
            "One day, {name} felt very lonely, because {he} had nobody to play with.",
            "Every day {name} played alone, and {he} wished for a friend.",
            "The {noun} had a warm home, but {he} did not have a friend.",
        ),
        (
            "So {he} took some {food} and went for a long walk.",
            "One morning {he} packed some {food} and went to look for a friend.",
        ),
        (
            "{He} met {a_htrait} {hnoun} named {hname}.",
            "On the way {he} saw {a_hnoun} named {hname}.",
        ),
        (
            '"Would you like to play {game}?" asked {name}.',
            '"Hello," said {name}. "Do you know how to play {game}?"',
            'The {noun} was a little afraid, but {he} asked, "Can we play {game}?"',
        ),
        (
            '"I would love to," said {hname}.',
            '"Yes!" said the {hnoun}. "I have nobody to play with either."',
        ),
        (
            "They played {game} all day and ate the {food} together.",
            "They played {game} until the sun went down, and then they shared the {food}.",
        ),
    ),
    lessons=(
        "{name} learned that a friend can be very near.",
        "The {noun} was not lonely any more.",
    ),
)

GIFT: Final[Plot] = Plot(
    name="gift",
    themes=("who gave {a_object} to a friend", "and a birthday"),
    beats=(
        (
            "One day, {name} heard that it was the birthday of {hname} the {hnoun}.",
            "The next day was the birthday of {a_hnoun} named {hname}, a good friend of {name}.",
        ),
        (
            "{name} wanted to give {hhim} a present, but {he} had no money.",
            '"What can I give to {hname}?" thought the {noun}.',
        ),
        (
            "All {he} had was {a_color} {object}, and {he} loved it very much.",
            "So {he} worked all night and made {a_color} {object}.",
        ),
        (
            "{name} put the {object} in a box and took it to {hname}.",
            "In the morning, the {noun} carried the {object} to the home of {hname}.",
        ),
        (
            'When {hname} saw the {object}, {hhe} smiled. "It is beautiful!" {hhe} said.',
            'The {hnoun} opened the box and laughed. "I always wanted {a_object}!"',
        ),
        (
            "They ate {food} and played {game} all day.",
            "Then {hname} and {name} sat down together and ate {food}.",
        ),
    ),
    lessons=(
        "{name} learned that it is nice to give.",
        "It was the best birthday of all, and the {noun} was very happy.",
    ),
)

NOISE: Final[Plot] = Plot(
    name="noise",
    themes=("who heard {noise}", "who heard a noise at night"),
    beats=(
        (
            "One night, {name} heard {noise}.",
            "One evening, the {noun} was eating {food} when {he} heard {noise}.",
        ),
        (
            '"What can that be?" {he} whispered.',
            '"Is it a monster?" thought {name}.',
        ),
        (
            "{He} took a lamp and went out to look.",
            "The {noun} went out on quiet feet.",
        ),
        (
            "The noise came from a place {search}.",
            "{He} followed the noise and looked {search}.",
        ),
        (
            "It was not a monster at all. It was {a_htrait} {hnoun} named {hname}.",
            "There sat {a_hnoun} named {hname}, who was learning to {skill}.",
        ),
        (
            '"I am sorry," said {hname}. "I did not want to wake you."',
            '"Do not be afraid," said the {hnoun}. "I am only learning to {skill}."',
        ),
        (
            "{name} laughed and gave {hhim} some {food}.",
            'The {noun} laughed. "Come in and have some {food}," {he} said.',
        ),
    ),
    lessons=(
        "{name} learned to look first and to be afraid later.",
        "After that, the {noun} was happy when {he} heard a noise at night.",
    ),
)

SHARE: Final[Plot] = Plot(
    name="share",
    themes=("who learned to share", "who had a lot of {food}"),
    beats=(
        (
            "One day, {name} found a big basket of {food}.",
            "One autumn day, somebody gave {name} a lot of {food}.",
        ),
        (
            '"This is all for me," thought the {noun}.',
            "{He} did not want to give any of it away.",
        ),
        (
            "Then {a_htrait} {hnoun} named {hname} came to the door.",
            "But then {he} saw {a_hnoun} named {hname} {place}.",
        ),
        (
            '"I have not eaten for two days," said {hname}.',
            'The {hnoun} said, "Please, can I have some {food}?"',
        ),
        (
            "{name} thought for a while. Then {he} gave {hname} half of the {food}.",
            'The {noun} felt sorry for {hhim}. "Sit down and eat with me," {he} said.',
        ),
        (
            "They ate and laughed, and the {food} tasted better than ever.",
            "When they had eaten, {hname} taught {name} to {skill}.",
        ),
    ),
    lessons=(
        "{name} learned that food tastes best when you share it.",
        "After that, the {noun} always kept a chair for {hname}.",
    ),
)

RACE: Final[Plot] = Plot(
    name="race",
    themes=("who ran in a race", "and a big race"),
    beats=(
        (
            "One day, there was a big race, and {name} wanted to win it.",
            "Every summer there was a race, and the {noun} had never won it.",
        ),
        (
            '"You are too slow," said {hname} the {hnoun}.',
            "{A_hnoun} named {hname} was the fastest of them all.",
        ),
        (
            "But {name} did not give up. {He} ran every day, in sun and in rain.",
            "{name} said nothing. {He} ate some {food} and tied {his} shoes.",
        ),
        (
            "When the race began, {hname} ran ahead, but {hhe} fell into a ditch.",
            "In the middle of the race, the {hnoun} fell and hurt {hhis} foot.",
        ),
        (
            "{name} stopped and helped {hhim} up.",
            "The {noun} could have won, but {he} stopped to help {hname}.",
        ),
        (
            '"Why did you stop?" asked {hname}. "Because you needed me," said {name}.',
            "They walked over the line together, and everybody cheered.",
        ),
    ),
    lessons=(
        "{name} learned that a friend is better than a prize.",
        "Nobody won the race, but the {noun} won a friend.",
    ),
)
