"""Turn names.csv into sequences.csv: one long sequence of letter classes for each country."""

import csv
import unicodedata
from pathlib import Path

LETTERS = {
    "vowel": "aeiouyəøœæ\N{LATIN SMALL LETTER DOTLESS I}",
    "liquid": "lmnrwjł",
    "stop": "bcdgkpqtxđðþ",
    "fricative": "fhsvzß",
}
CLASSES = {letter: name for name, letters in LETTERS.items() for letter in letters}


def plain(name: str) -> str:
    """Lower case, without accents."""
    letters = unicodedata.normalize("NFD", name.lower())
    return "".join(letter for letter in letters if not unicodedata.combining(letter))


def main(folder: Path) -> Path:
    """Write sequences.csv; `end` comes between two names."""
    sequences: dict[str, list[str]] = {}
    with open(folder / "names.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            states = [CLASSES[letter] for letter in plain(row["name"])]
            sequences.setdefault(row["locale"], []).extend([*states, "end"])
    path = folder / "sequences.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["group", "order", "state"])
        for locale, states in sequences.items():
            writer.writerows([locale, order, state] for order, state in enumerate(states))
    return path


if __name__ == "__main__":
    print(main(Path(__file__).parent))
