"""Cell values of invented tables, by kind: names, dates, scores, codes, measurements.

`VALUES.draw("win_loss", rng)` gives '46-29'. It knows nothing of columns or questions.
"""

from random import Random

from tools.synthetic.grammar import Grammar
from tools.synthetic.word_lists import WORDS

NUMERIC_KINDS = ("year", "count", "rank", "big", "decimal", "par")  # MAX, AVG, < make sense on them

RULES = """
person = {given_name} {surname} *24 | {given_name} {letter}. {surname}
surname = {known_surname} | {surname_start}{surname_ending}
couple = {person} & {person} | {person} / {person} | {person} and {person}
player_points = {person} ({4-44}) *2 | {surname} ({4-44})
player_record = {surname} ({0-20}-{0-16}) | {surname} ({0-20}{en}{0-16})

town = {city} *9 | {town_start}{town_ending} *9 | {saint} {surname} *2
saint = Fort | Port | Saint | San | Lake | Mount
place = {town}, {state} *3 | {town}, {country} *2 | {town} *5
district = {state} {1-30}
venue = {town} {ground} *6 | {surname} {ground} *3 | {estadio} {surname}
estadio = Estadio | Stade | Stadio | Arena
venue_attendance = {venue} {4-24},{0-9}{0-9}{0-9}
circuit = {town} {raceway}
raceway = Raceway | Circuit | Speedway | Motor Speedway | Ring | 400 | 500
college = {campus} *2 | {campus} State | University of {campus} | {campus} University
    | {campus} College | {campus} Tech | {campus} High School
campus = {state} | {town}
company = {surname} {trade}
club = {town} *3 | FC {town} | {town} {club_suffix} *6
franchise = {mascot} | {city} | {city} {mascot} *2

title = The {Adjective} {Noun} *2 | The {Noun} | {Noun} of the {Noun} | {Adjective} {Noun} | {Noun}
    | {Noun} and {Noun} | The {Noun} in the {Noun} | {verb} {given_name} | {verb} the {Noun}
    | {surname}'s {Noun} | {Noun} {Noun} | My {Adjective} {Noun} | {Noun}, Part {1-3}
    | What {given_name} Knew | No {Noun} for {given_name}
chinese_title = {glyph}{glyph} | {glyph}{glyph}{glyph} | {glyph}{glyph}{glyph}{glyph}
phrase = {adjective} {noun} | {noun} | {part} | {adjective} {part} | {part} and {noun} | {status}
    | new {part} fitted in {year} | moved to {town} | replaced by {surname}

date = {month} {1-28}, {1935-2013} *40 | {month} {1-28} *24 | {1-28} {month} {1935-2013} *16
    | {1-28} {month} *6 | {short_month} {1-28} *4 | {1935-2013}-0{1-9}-{10-28} *4
    | {month} {1935-2013} *3 | {1-28} {short_month} {1935-2013} | {1-12}/{1-28}/{50-99}
year = {1900-1959} *2 | {1960-1989} *3 | {1990-2013} *5
years = {1930-1979}-{1980-2012} | {1930-1979}{en}{1980-2012} | {1950-2009}{en}{10-99}
clock = {1-12}:{minutes} *2 | {1-12}:{minutes} pm | {1-12}:{minutes} PM | {1-12}:{minutes} am
minutes = 00 | 05 | 15 | 30 | 45
lap_time = {1-9}:{10-59}.{100-999} *5 | +{1-59}.{100-999} *2 | {1-30}:{10-59}:{10-59}
    | {9-59}.{10-99} *2

count = {0-5} | {0-10} | {0-20} | {0-40} | {0-100} | {0-300}
rank = {1-40}
par = {1-20} | +{1-14} | {en}{1-18} | -{1-18}
big = {300-999} *2 | {1-9},{0-9}{0-9}{0-9} *4 | {10-99},{0-9}{0-9}{0-9} *6
    | {100-900},{0-9}{0-9}{0-9} | {1000-99999} *2
decimal = 0.{0-9}{0-9}{0-9} | {0-9}.{0-9}{0-9} *2 | {0-19}.{0-9} *2 | {10-99}.{0-9}{0-9}
percent = {0-99}.{0-9}% *5 | {0-99}% *3 | {0-99}.{0-9}{0-9}% *2
money = {currency}{100-999} | {currency}{1-99},{0-9}{0-9}{0-9} *3
    | {currency}{1-9},{0-9}{0-9}{0-9},000
currency = $ *8 | £ *2 | €
measurement = {2-900}{unit} | {2-900} {unit} *3 | {1-90}.{0-9} {unit} *2 | {1-90}.{0-9}{unit}
    | {1-9},{0-9}{0-9}{0-9} {unit} | {5-7} ft {0-11} in
ordinal = 1st *6 | 2nd *4 | 3rd *3 | {4-9}th *5 | {10-20}th *2
code = {letter}{letter}-{1-9999} | {letter}{1-999} | {letter}{letter}{letter} {1-9999}
    | {1-999}{letter} | {1-9}{letter}{100-9999} | {letter}{letter}{letter}{letter}-{1-999}
callsign = K{letter}{letter}{letter} *3 | W{letter}{letter}{letter} *3
    | W{letter}{letter}{letter}-FM | K{letter}{letter}{letter}-TV | {letter}{2-60}{letter}{letter}
frequency = {88-107}.{odd} *2 | {88-107}.{odd} FM | {54-160}0 AM
odd = 1 | 3 | 5 | 7 | 9

goals = {0-5}-{0-4} *2 | {0-5}{en}{0-4} *2 | {0-5} {en} {0-4}
basketball = {won} {74-134}-{74-134} *3 | {won} {74-134}{en}{74-134} *3
    | {won} {90-134}{en}{90-134} (OT)
gridiron = {won} {0-45}-{0-45} *3 | {won} {0-45}{en}{0-45} *3 | {won} {10-40}-{10-40} OT
won = W | L
sets = {set}, {set} *2 | {set}, {set}, {set} | {dashed_set}, {dashed_set} *2
    | {dashed_set}, {dashed_set}, {dashed_set}
set = 6-4 | 6-3 | 6-2 | 7-5 | 6-1 | 3-6 | 7-6(5) | 4-6 | 6-0
dashed_set = 6{en}{0-4} *6 | 7{en}5 | {1-4}{en}6 *2 | 7{en}6(5)
win_loss = {0-80}-{0-80} *4 | {0-30}{en}{0-30} *3 | {0-12}-{0-12}-{0-5} | {0-30}{en}{0-9}{en}{0-5}
"""


def australian_score(rng: Random) -> str:
    """Goals, behinds and points of Australian football: '12.14 (86)'."""
    goals, behinds = rng.randint(4, 22), rng.randint(3, 20)
    return f"{goals}.{behinds} ({6 * goals + behinds})"


def golf_score(rng: Random) -> str:
    """Strokes of each round and their sum: '67-72-71-75=285'."""
    rounds = [rng.randint(64, 79) for _ in range(rng.choice((1, 2, 3, 4, 4)))]
    total = f"={sum(rounds)}" if len(rounds) > 1 else ""
    return "-".join(map(str, rounds)) + total


VALUES = Grammar(
    RULES,
    WORDS,
    {"australian": australian_score, "golf": golf_score, "en": lambda rng: "\N{EN DASH}"},
)
