"""Names of people, companies, towns and books, made of common words: a small model can copy them, and none repeats."""

import random
from collections.abc import Iterator, Sequence

__all__ = ["book_names", "company_names", "person_names", "town_names", "with_middle_name"]

# fmt: off
_FIRST = (
    "Ada", "Alan", "Alice", "Amy", "Anna", "Ben", "Bella", "Carl", "Clara", "Dan", "David", "Diana", "Ella", "Emil",
    "Emma", "Eric", "Eva", "Fay", "Felix", "Frank", "Fred", "Grace", "Hank", "Helen", "Henry", "Hugo", "Ian", "Ida",
    "Iris", "Jack", "James", "Jane", "John", "Julia", "Karl", "Kate", "Laura", "Leo", "Lily", "Lisa", "Louis", "Lucy",
    "Mark", "Martin", "Mary", "Max", "Nina", "Nora", "Oscar", "Otto", "Paul", "Peter", "Ralph", "Robert", "Rosa",
    "Ruth", "Sam", "Sarah", "Simon", "Sofia", "Tom", "Vera", "Victor", "Walter",
)
_MIDDLE = ("Rose", "Lee", "Jay", "Ray", "May", "Dean", "Lynn", "Drew")
_STEM = (
    "Ash", "Bar", "Beck", "Black", "Brook", "Burn", "Cam", "Clay", "Cole", "Corn", "Cross", "Dal", "Deer", "East",
    "Elm", "Fair", "Farm", "Field", "Fox", "Glen", "Gold", "Grand", "Gray", "Green", "Hamp", "Hart", "Hill", "Holly",
    "King", "Lake", "Lang", "Long", "Marsh", "May", "Mill", "Moor", "North", "Oak", "Old", "Park", "Pine", "Red",
    "Rock", "Rose", "Sand", "Snow", "Spring", "Stan", "Stock", "Stone", "Sun", "Thorn", "Wal", "West", "White", "Wood",
)
_OF_PEOPLE = ("man", "er", "son", "well", "wood", "land", "ley", "worth", "field", "smith", "stone", "ward")
_OF_TOWNS = ("ford", "ton", "ville", "dale", "bridge", "port", "bury", "haven", "mouth", "stead", "gate", "brook")
_PLACE = (
    "", "North", "South", "East", "West", "Lake", "Port", "New", "Old", "Upper", "Lower", "Fort", "Mount", "Saint",
)
_COLOUR = (
    "Amber", "Blue", "Bright", "Bronze", "Copper", "Crystal", "Delta", "Dragon", "Eagle", "Falcon", "Global", "Golden",
    "Granite", "Grand", "Green", "Iron", "Ivory", "Liberty", "Lion", "Lunar", "Magic", "Marble", "Metro", "Noble",
    "Ocean", "Omega", "Pacific", "Pearl", "Phoenix", "Pilot", "Prime", "Royal", "Ruby", "Silver", "Solar", "Star",
    "Steel", "Summit", "Swift", "Tiger", "Titan", "Union", "United", "Velvet", "Victory", "Vital", "Winter", "Zenith",
)
_THING = (
    "Arrow", "Bay", "Bell", "Bridge", "Castle", "Cloud", "Compass", "Crown", "Desert", "Diamond", "Door", "Field",
    "Flame", "Forest", "Garden", "Gate", "Harbor", "Hill", "Horse", "Island", "Key", "Lamp", "Leaf", "Light", "Mirror",
    "Moon", "Mountain", "Needle", "Orchard", "Path", "Planet", "River", "Road", "Sail", "Shadow", "Shield", "Ship",
    "Sky", "Spring", "Stone", "Storm", "Sword", "Table", "Tower", "Tree", "Valley", "Water", "Wheel", "Wind", "Wolf",
)
_BUSINESS = (
    "Bank", "Books", "Foods", "Games", "Gas", "Glass", "Group", "Labs", "Media", "Metals", "Motors", "Oil", "Paper",
    "Press", "Radio", "Steel", "Tools", "Toys", "Trading", "Works",
)
# fmt: on


def person_names(rng: random.Random) -> Iterator[str]:
    """36,864 of them, as `Anna Oakley`."""
    return _shuffled(rng, _FIRST, (" ",), _STEM, _OF_PEOPLE)


def with_middle_name(name: str, rng: random.Random) -> str:
    """Of somebody else, as `Anna Rose Oakley`."""
    first, last = name.split(" ")
    return f"{first} {rng.choice(_MIDDLE)} {last}"


def company_names(rng: random.Random) -> Iterator[str]:
    """48,000 of them, as `Silver Harbor Press`."""
    return _shuffled(rng, _COLOUR, (" ",), _THING, (" ",), _BUSINESS)


def town_names(rng: random.Random) -> Iterator[str]:
    """9,408 of them, as `Ashford` or `Port Ashford`."""
    return (name.strip() for name in _shuffled(rng, _PLACE, (" ",), _STEM, _OF_TOWNS))


def book_names(rng: random.Random) -> Iterator[str]:
    """115,200 of them, as `The Silver Harbor and the Lamp`."""
    return _shuffled(rng, ("The ",), _COLOUR, (" ",), _THING, (" and the ",), _THING)


def _shuffled(rng: random.Random, *parts: Sequence[str]) -> Iterator[str]:
    """All combinations, in an order of their own."""
    sizes = [len(part) for part in parts]
    total = 1
    for size in sizes:
        total *= size
    for number in rng.sample(range(total), total):
        words = []
        for part, size in zip(reversed(parts), reversed(sizes), strict=True):
            number, place = divmod(number, size)
            words.append(part[place])
        yield "".join(reversed(words))
