"""Word lists of the story grammar. Data only; every tuple is immutable."""

from typing import Final


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of `text`, which any white space separates."""
    return tuple(text.split())


ANIMALS: Final[tuple[str, ...]] = split_words(
    """
    fox bear wolf rabbit hare mouse rat owl hedgehog squirrel badger deer otter beaver mole frog
    toad newt turtle tortoise snail bee ant spider beetle butterfly moth cricket cat dog puppy
    kitten cow pig goat sheep lamb horse pony donkey duck goose swan hen rooster sparrow robin crow
    raven magpie eagle hawk stork heron seal whale dolphin shark crab fish octopus lion tiger
    elephant monkey snake lizard crocodile parrot peacock bat lynx moose
    """
)

HELD_OUT_ANIMALS: Final[tuple[str, ...]] = split_words(
    """
    giraffe zebra kangaroo walrus penguin ostrich panda camel gorilla lobster hamster pelican
    flamingo raccoon leopard buffalo jaguar llama koala skunk
    """
)

PEOPLE: Final[tuple[str, ...]] = split_words(
    """
    dragon robot wizard witch giant knight princess prince king queen pirate sailor farmer baker
    miller gardener painter fairy elf troll goblin ghost mermaid unicorn boy girl child clown
    teacher doctor shepherd astronaut tailor hunter fisherman monster snowman captain
    """
)

THINGS: Final[tuple[str, ...]] = split_words(
    """
    teapot train boat tractor cloud star moon tree flower stone leaf candle clock chair broom bus
    truck rocket pumpkin potato carrot onion cabbage pebble river shadow snowflake wheel bridge
    chimney pillow sock boot glove hat hill wave seed acorn puddle cookie cake planet computer
    """
)

GIRL_NAMES: Final[tuple[str, ...]] = split_words(
    """
    Mila Nora Ruby Lily Hazel Clara Ella Rosa Tilly Wanda Ivy Pearl Daisy Luna Maya Zoe Bella Greta
    Frida Olive Poppy Sana Yuki Amara Dora Juno Kira Petra Vera Willa
    """
)

BOY_NAMES: Final[tuple[str, ...]] = split_words(
    """
    Max Theo Oscar Hugo Felix Otto Bruno Finn Leo Milo Toby Sam Ben Jack Oliver Ravi Kenji Emil
    Gus Henry Igor Jonas Karl Ned Pip Rufus Simon Tom Victor Walter
    """
)

PLACES: Final[tuple[str, ...]] = (
    "in the forest",
    "in the valley",
    "in the meadow",
    "in the garden",
    "in the desert",
    "in the jungle",
    "in the village",
    "in the old castle",
    "in the big city",
    "in the mountains",
    "in the swamp",
    "in the orchard",
    "in the old mill",
    "in the deep cave",
    "in the quiet harbor",
    "in the snowy north",
    "in the tall tower",
    "on the farm",
    "on the island",
    "on the hill",
    "on the beach",
    "on the moon",
    "on the cliff",
    "on the prairie",
    "by the sea",
    "by the river",
    "by the lake",
    "by the pond",
    "by the waterfall",
    "by the old bridge",
    "near the lighthouse",
    "near the windmill",
    "near the volcano",
    "near the market",
)

SEARCH_PLACES: Final[tuple[str, ...]] = (
    "under a flat rock",
    "behind the old barn",
    "inside a hollow log",
    "at the bottom of the well",
    "under the wooden bridge",
    "in a bird's nest",
    "in the tall grass",
    "beside the narrow path",
    "behind a big bush",
    "under a pile of leaves",
    "between two tree roots",
    "on top of the wall",
)

OBJECTS: Final[tuple[str, ...]] = split_words(
    """
    kite key ball bell lantern drum flute map book ring crown scarf coat basket box spoon cup
    mirror button feather shell coin compass ribbon umbrella whistle blanket doll wagon necklace
    bracelet paintbrush pencil trumpet guitar balloon medal marble ladle locket telescope suitcase
    violin teacup
    """
)

COLORS: Final[tuple[str, ...]] = split_words(
    "red blue green yellow golden silver purple orange white black pink brown shiny striped"
)

TRAITS: Final[tuple[str, ...]] = split_words(
    """
    kind brave curious shy clever gentle lazy proud cheerful patient grumpy quiet honest playful
    careful funny lonely stubborn polite friendly sleepy hungry wise nervous tiny young old small
    """
)

FOODS: Final[tuple[str, ...]] = (
    "bread",
    "nuts",
    "popcorn",
    "grapes",
    "cheese",
    "berries",
    "pancakes",
    "apples",
    "carrots",
    "mushrooms",
    "chestnuts",
    "plums",
    "cherries",
    "sandwiches",
    "biscuits",
    "pears",
)

FEARS: Final[tuple[str, ...]] = (
    "the dark",
    "thunder",
    "deep water",
    "high places",
    "loud noises",
    "strangers",
    "the wind",
    "shadows",
    "flying",
    "swimming",
)

NOISES: Final[tuple[str, ...]] = (
    "a strange humming",
    "a soft tapping",
    "a deep rumbling",
    "a sad whistle",
    "a loud splash",
    "a quiet song",
    "a funny squeak",
    "a slow creaking",
)

GAMES: Final[tuple[str, ...]] = (
    "hide and seek",
    "catch",
    "chess",
    "tag",
    "leapfrog",
    "cards",
    "marbles",
    "follow the leader",
)

PROJECTS: Final[tuple[str, ...]] = (
    "a tree house",
    "a small boat",
    "a snow house",
    "a wooden bridge",
    "a stone tower",
    "a warm hut",
    "a flying machine",
    "a sand castle",
    "a garden fence",
    "a raft",
)

SKILLS: Final[tuple[str, ...]] = (
    "sing",
    "dance",
    "swim",
    "paint",
    "read",
    "whistle",
    "juggle",
    "skate",
    "cook",
    "play the drum",
)

GIRL_NOUNS: Final[frozenset[str]] = frozenset(
    split_words("witch princess queen mermaid girl cow hen fairy")
)

BOY_NOUNS: Final[frozenset[str]] = frozenset(
    split_words("wizard prince king boy fisherman snowman rooster")
)

ONSETS: Final[tuple[str, ...]] = split_words(
    """
    b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kn l m n p ph pl pr qu r s sc sh sk sl sm sn
    sp squ st str sw t th tr v w wh y z
    """
)

VOWELS: Final[tuple[str, ...]] = split_words("a a a e e e i i i o o o u u ai ee ea oo ou oi y")

CODAS: Final[tuple[str, ...]] = split_words(
    "b ck d ff g l ll m mp n nd ng nk nt p r rd rk rm rn s sk ss st t th x z"
)

ENDINGS: Final[tuple[str, ...]] = split_words("a o e y er on el in us ish let ock ant ine oo")
