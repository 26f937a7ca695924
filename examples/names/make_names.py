"""Write names.csv: first names of many countries, from the package Faker (MIT licence).

python -m pip install faker==40.63.0
python make_names.py
"""

import csv
import random
from importlib import import_module
from pathlib import Path

from sequences import CLASSES, plain

LOCALES = (
    *("az_AZ", "cs_CZ", "da_DK", "de_DE", "en_GB", "en_IE", "en_IN", "en_KE", "es_ES", "et_EE"),
    *("fi_FI", "fr_FR", "ga_IE", "hr_HR", "hu_HU", "id_ID", "is_IS", "it_IT", "lt_LT", "lv_LV"),
    *("nl_NL", "no_NO", "pl_PL", "pt_PT", "ro_RO", "sk_SK", "sl_SI", "sv_SE", "sw", "tr_TR"),
    *("tw_GH", "uz_UZ", "yo_NG", "zu_ZA"),
)
"""One of each language in Latin letters, and four of English."""
MOST = 150
"""Names of a locale; there may be fewer."""


def names_of(locale: str) -> list[str]:
    """Names in Latin letters, at most MOST of them, in an order that says nothing."""
    provider = import_module(f"faker.providers.person.{locale}").Provider
    found = set()
    for kind in ("first_names", "first_names_male", "first_names_female"):
        names = vars(provider).get(kind, ())
        if not isinstance(names, property):
            found |= {name for name in names if set(plain(name)) <= set(CLASSES)}
    names = sorted(found)
    random.Random(locale).shuffle(names)
    return names[:MOST]


with open(Path(__file__).with_name("names.csv"), "w", encoding="utf-8", newline="") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["locale", "name"])
    for locale in LOCALES:
        writer.writerows([locale, name] for name in names_of(locale))
