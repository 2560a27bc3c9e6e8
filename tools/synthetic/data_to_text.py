"""Data-to-text prompts: what is known of an invented restaurant, as `slot[value], slot[value]`.

Slots, their order and their closed sets of values are those of the E2E task; names of restaurants
and of places nearby are invented. It knows nothing of the text that describes the restaurant.
"""

from random import Random

from tools.synthetic.grammar import Grammar
from tools.synthetic.word_lists import WORDS

RULES = """
restaurant = The {quality} {thing} *3 | The {thing} *5 | {coined} *4 | {coined} {house}
    | {known_surname}'s *2 | {town_start}{town_ending} {house} | The {known_surname} {house}
    | {dish} {house} *2 | {colour} {flavour} *3 | {thing} & {thing} | Taste of {city} | {thing} *2
    | {given_name}'s {house} | The {creature} *5 | The {quality} {creature} *3 | {city} {house} *2
near = {restaurant} *5 | Café {city} *3 | Café {coined} *2 | The {known_surname} Arms *2
    | {town_start}{town_ending} {landmark} | {city} {dish} Bar | {known_surname} {landmark} *2
    | {city} {landmark} *2 | Hotel {city} *2 | {dish} {city}

quality = Amber | Brass | Broken | Copper | Crooked | Dancing | Flying | Gilded | Happy | Hidden
    | Hungry | Jolly | Laughing | Little | Lucky | Merry | Old | Painted | Quiet | Rolling | Royal
    | Rusty | Secret | Silver | Singing | Sleepy | Spotted | Thirsty | Velvet | Wandering
thing = Anchor | Apron | Balcony | Barrel | Bell Tower | Boathouse | Bridge | Candle | Cellar
    | Clock | Courtyard | Fig Tree | Fountain | Galleon | Garden | Hearth | Juniper | Kettle | Key
    | Ladle | Lantern | Larder | Lemon Tree | Lighthouse | Orchard | Oven | Pantry | Parlour
    | Pepper Pot | Quay | Saffron Room | Skillet | Spoon | Teapot | Terrace | Thistle | Wharf
creature = Badger | Bear | Crane | Dolphin | Falcon | Fox | Hare | Heron | Kingfisher | Magpie
    | Otter | Owl | Peacock | Pelican | Ram | Robin | Salmon | Stag | Swallow | Swan | Tortoise
    | Unicorn
coined = {coined_start}{coined_ending}
coined_start = Al | Bel | Bra | Ca | Cor | Del | Fa | Fio | Gal | Giu | Lo | Lu | Mar | Mi | Nor
    | Or | Pa | Per | Ro | Sa | Sol | Ta | Tri | Va | Ver | Vi | Za
coined_ending = bella | cciano | chetta | dena | fino | gri | lina | lotto | menta | mio | nara
    | nello | netti | pasto | rello | rino | rosa | sotti | tano | tello | vanti | vino | zetta
house = House | Kitchen | Place | Grill | Brasserie | Bistro | Tavern | Eatery | Corner | Rooms
    | Bar
dish = Dim Sum | Dosa | Noodle | Pasta | Pie | Pizza | Ramen | Risotto | Spice | Sushi | Tandoori
    | Curry | Burger | Crêpe | Teriyaki | Masala | Baguette | Roast | Tiffin | Bento
colour = Azure | Black | Crimson | Golden | Green | Ivory | Jade | Orange | Pink | Scarlet | White
flavour = Basil | Cardamom | Cinnamon | Clove | Cumin | Ginger | Mint | Olive | Pepper | Plum
    | Rosemary | Saffron | Sesame | Sumac | Thyme | Truffle
landmark = Hotel | Inn | Hall | Theatre | Station | Park | Library | Museum | Bakery | Market
    | Lodge | Coffee Bar | Burger Bar | Noodle Bar

eatType = coffee shop *4 | pub *3 | restaurant *3
food = Chinese | English | Fast food | French | Indian | Italian | Japanese
priceRange = cheap | moderate | high | less than £20 | £20-25 | more than £30
customer rating = low | average | high | 1 out of 5 | 3 out of 5 | 5 out of 5
area = riverside *5 | city centre *4
familyFriendly = yes *5 | no *4
"""

# How often a prompt has each slot, in their order; the name is always there.
PRESENCE = {
    "eatType": 0.6,
    "food": 0.83,
    "priceRange": 0.7,
    "customer rating": 0.62,
    "area": 0.62,
    "familyFriendly": 0.65,
    "near": 0.56,
}
FEWEST_SLOTS = 3

RESTAURANTS = Grammar(RULES, WORDS, {})


def draw_prompt(rng: Random) -> str:
    """One prompt: 'name[The Copper Kettle], eatType[pub], food[English], area[riverside]'."""
    slots: list[str] = []
    while len(slots) + 1 < FEWEST_SLOTS:
        slots = [slot for slot, share in PRESENCE.items() if rng.random() < share]
    values = {"name": RESTAURANTS.draw("restaurant", rng)}
    values |= {slot: RESTAURANTS.draw(slot, rng) for slot in slots}
    return ", ".join(f"{slot}[{value}]" for slot, value in values.items())
