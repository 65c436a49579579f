"""The words of the worked prose: scenes, people, frames and cues. Data only; `worked_prose.py` puts them together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scene:
    """A place of work: where it is, who works there, what is counted there and in what it is kept."""

    place: str
    store: str
    people: tuple[str, ...]
    goods: tuple[tuple[str, str], ...]  # (containers, things in them)
    tails: tuple[str, ...]  # how a sentence may go on after the counted things


SCENES = (
    Scene(
        "the bakery",
        "pantry",
        ("the baker", "the apprentice", "the miller"),
        (("trays", "rolls"), ("baskets", "loaves"), ("tins", "biscuits"), ("boxes", "cakes")),
        (" for the morning", " before the shop opened", " for the fair", ""),
    ),
    Scene(
        "the orchard",
        "barn",
        ("the farmer", "the picker", "the farmer's son"),
        (("crates", "apples"), ("baskets", "pears"), ("sacks", "nuts"), ("buckets", "plums")),
        (" for the market", " ready for the cart", " from the lower field", ""),
    ),
    Scene(
        "the harbour",
        "warehouse",
        ("the captain", "the clerk", "the mate"),
        (("barrels", "herrings"), ("crates", "oranges"), ("sacks", "melons"), ("bundles", "ropes")),
        (" on board", " for the next ship", " on the quay", ""),
    ),
    Scene(
        "the library",
        "reading room",
        ("the librarian", "the porter", "a student"),
        (("shelves", "books"), ("boxes", "letters"), ("drawers", "cards"), ("cases", "maps")),
        (" in the catalogue", " for the winter", " to be bound", ""),
    ),
    Scene(
        "the school",
        "cupboard",
        ("the teacher", "the caretaker", "the head of the school"),
        (("boxes", "pencils"), ("packets", "papers"), ("tins", "brushes"), ("jars", "beads")),
        (" for the autumn term", " for the younger children", " in the store", ""),
    ),
    Scene(
        "the nursery garden",
        "greenhouse",
        ("the gardener", "the keeper", "the gardener's daughter"),
        (("rows", "tulips"), ("beds", "roses"), ("trays", "seedlings"), ("bags", "bulbs")),
        (" for the spring", " along the wall", " ready to plant", ""),
    ),
    Scene(
        "the toy workshop",
        "attic",
        ("the carver", "the painter", "the owner"),
        (("boxes", "marbles"), ("bags", "wheels"), ("crates", "dolls"), ("trays", "whistles")),
        (" for the holidays", " in bright paint", " for the shops", ""),
    ),
    Scene(
        "the post office",
        "sorting room",
        ("the postman", "the clerk", "the driver"),
        (("sacks", "letters"), ("bundles", "parcels"), ("sheets", "stamps"), ("boxes", "cards")),
        (" for the evening train", " for the islands", " that week", ""),
    ),
    Scene(
        "the theatre",
        "foyer",
        ("the manager", "the cashier", "the usher"),
        (("rows", "seats"), ("books", "tickets"), ("boxes", "posters"), ("packs", "programmes")),
        (" for the season", " for the first night", " that month", ""),
    ),
    Scene(
        "the hardware shop",
        "back room",
        ("the shopkeeper", "the joiner", "the smith"),
        (("boxes", "nails"), ("tins", "screws"), ("racks", "tiles"), ("pallets", "bricks")),
        (" for the new roof", " on the lower shelf", " for the builder", ""),
    ),
    Scene(
        "the museum",
        "vault",
        ("the curator", "the guard", "the visitor"),
        (("cases", "coins"), ("drawers", "shells"), ("trays", "stones"), ("albums", "prints")),
        (" in the collection", " from the old house", " on show", ""),
    ),
    Scene(
        "the mill",
        "loft",
        ("the weaver", "the foreman", "the dyer"),
        (("bales", "blankets"), ("boxes", "buttons"), ("racks", "shirts"), ("bags", "ribbons")),
        (" for the merchant", " in three colours", " by the end of the week", ""),
    ),
    Scene(
        "the railway yard",
        "goods shed",
        ("the driver", "the signalman", "the inspector"),
        (("wagons", "barrels"), ("pallets", "boxes"), ("carts", "trunks"), ("trucks", "sleepers")),
        (" for the north line", " before noon", " under the roof", ""),
    ),
    Scene(
        "the inn",
        "cellar",
        ("the cook", "the innkeeper", "the maid"),
        (("baskets", "eggs"), ("racks", "bottles"), ("shelves", "plates"), ("boxes", "candles")),
        (" for the wedding", " for the guests", " in good order", ""),
    ),
)

NAMES = (
    "Anna", "Ben", "Clara", "David", "Elsa", "Frank", "Greta", "Hugo", "Ida", "Jonas", "Karen", "Leo",
    "Maria", "Nora", "Oscar", "Paula", "Rosa", "Simon", "Tom", "Vera", "Walter", "Yusuf", "Amina", "Chen",
    "Priya", "Omar", "Lucia", "Peter", "Sofia", "Hana", "Ivan", "Martha", "Samuel", "Ruth", "Daniel", "Alice",
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = (
    "in the morning", "after lunch", "on the first day", "last week", "before the rain", "at noon", "late in the day",
    "during the holidays", "in early spring", "at the end of the month", "on a cold day", "two days later",
)  # fmt: skip

VERBS = ("counted", "packed", "ordered", "sold", "found", "bought", "unloaded", "checked")

# {who} someone, {a} {b} operands, {boxes} {items} the goods, {place} {store} the scene, {time} a time of day or year
PRODUCT_FRAMES = (
    "{who} {verb} {a} {boxes} of {b} {items} each",
    "{time} {who} {verb} {a} {boxes} of {b} {items} each",
    "there were {a} {boxes} in the {store}, and every one held {b} {items}",
    "{a} {boxes} came to {place} {time}, with {b} {items} in each",
    "the order was for {a} {boxes} with {b} {items} apiece",
    "{who} filled {a} {boxes}, putting {b} {items} into each",
    "{place} keeps {a} {boxes} of {b} {items} each in the {store}",
    "{who} wrote down {a} {boxes} and {b} {items} to each of them",
)

# {w} {x} {y} {z} four amounts
SUM_FRAMES = (
    "{who} {verb} {w} {items} on {day1}, {x} on {day2}, {y} on {day3} and {z} on {day4}",
    "the four {boxes} in the {store} held {w}, {x}, {y} and {z} {items}",
    "{name1} brought {w} {items}, {name2} {x}, {name3} {y} and {name4} {z}",
    "{w} {items} went to the north, {x} to the south, {y} to the east and {z} to the west",
    "in spring there were {w} {items}, in summer {x}, in autumn {y} and in winter {z}",
    "the first cart carried {w} {items}, the second {x}, the third {y} and the last {z}",
    "{who} {verb} {w} {items}, then {x}, then {y} and then {z}",
    "from the books of {place}: {w} {items}, {x}, {y} and {z}",
)

# {n} full containers of {b}, and {c} beside them
LOAD_FRAMES = (
    "{who} had {n} full {boxes} of {b} {items} and {c} loose ones",
    "besides {n} {boxes} with {b} {items} each there were {c} {items} in the {store}",
    "{who} {verb} {n} {boxes} of {b} {items} each and another {c} {items} {time}",
    "{place} had {c} {items} already and {n} {boxes} came with {b} in each",
    "{n} {boxes} of {b} {items} each stood beside a heap of {c}",
    "to the {c} {items} in the {store} {who} added {n} {boxes} of {b} each",
)

# What stands right before a result. Nothing else in the prose ends like this, so a pattern finds results from the left.
CUES = (
    ", which makes",
    ", which comes to",
    ", for a total of",
    ", and that adds up to",
    ", which amounts to",
    ", so the count is",
    ". All told this makes",
    ". The tally reads",
)
# The sentence with the operands must be visible from its start, in case a document was cut at the edge of a sequence.
MATCH_PATTERN = r"(?:^|[.] )[A-Z\d][^.]*(?:" + "|".join(cue.replace(".", "[.]") for cue in CUES) + ")"

FILLERS = (
    "{name1} liked {place} best {time}.",
    "It had been raining since {day1}, and the road to {place} was wet.",
    "{who} shut the door of the {store} and went home.",
    "{name1} asked {name2} to look after {place} until {day1}.",
    "Nobody at {place} had seen so many {items} before.",
    "The {boxes} were heavy, so {name1} and {name2} carried them together.",
    "{name1} wrote a letter to {name2} about it {time}.",
    "On {day1} {who} came early and left late.",
    "The price of {items} had gone up again, said {who}.",
    "{name1} put the {items} in order, the large ones first.",
    "{who} did not trust the figures and asked {name1} to go over them.",
    "There was a smell of paint and new wood in the {store}.",
    "{name1} and {name2} had known each other since school.",
    "A dog slept under the table while {name1} worked.",
    "{time} the light in the {store} was poor.",
    "{who} told {name1} that the {boxes} would be needed on {day1}.",
    "The people of the town came to {place} every {day1}.",
    "{name1} made tea for everyone and opened the window.",
    "Some of the {items} were old, but most of them were new.",
    "{name2} wanted to know how it was done, and {name1} showed it twice.",
    "The train was late on {day1}, as it often was.",
    "{who} had a brother who worked in the next town.",
    "Before it got dark {name1} swept the floor.",
    "The {store} was full, and a few {boxes} had to stay outside.",
)
