"""The tools and values of synthetic rows of full size, for train and for test.

A tool is written as its name and its purpose. The line below is the request for it. The slots of
the request are the tool's parameters, in order:

    {city:city}              key and kind of value; the kinds are below
    {unit=celsius|kelvin}    a string, one of these
    {gift?with|without}      a boolean: the text for true, the text for false

The two splits share no tool, no set of parameter names and no value, except for true and false.
"""

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal

Split = Literal["train", "test"]
Value = str | int | float | bool
SLOT = re.compile(r"\{(\w+)([:=?])([^}]*)\}")
TEST_EVERY = 5  # every fifth value of a kind is for the test split


def words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


CITIES = words(
    "Oslo Lima Kyiv Bern Cairo Quito Hanoi Turin Porto Ghent Lyon Accra Delhi Osaka Perth Malmo "
    "Split Basel Dakar Leeds Bogota Tunis Riga Graz Sofia Kochi Davao Cusco Aarhus Utrecht"
)
FIRST = words("Ada Bruno Chloe Dmitri Elif Farid Greta Hugo Ines Jonas Kamala Liam Mei Nadia Omar")
LAST = words("Alvarez Brandt Costa Dubois Eriksen Fofana Gupta Horvat Ito Jansen Kaya Lindqvist")
DOMAINS = words("example.com example.org example.net mail.example")
COMPANIES = words(
    "Acorn Labs,Blue Kite,Copper Hill,Delta Foods,Echo Rail,Fern Media,Gull Air,Harbor Steel,"
    "Iris Optics,Juniper Bank,Kestrel Motors,Lumen Grid,Maple Paper,Nimbus Data,Opal Mining",
    ",",
)
ITEMS = words(
    "desk lamp,rain jacket,coffee grinder,office chair,camping stove,bike helmet,water filter,"
    "phone case,yoga mat,table fan,travel mug,garden hose,wall clock,tool box,running shoes",
    ",",
)
TOPICS = words(
    "solar power,jazz history,marine biology,urban farming,chess openings,glass blowing,"
    "volcanoes,bee keeping,medieval castles,bread baking,star maps,ocean currents,wool dyeing,"
    "river deltas,paper folding,bird migration,steam engines,cave paintings,tea rituals,"
    "kite design",
    ",",
)
PLACES = words(
    "the north gate,the main hall,platform 3,the harbor office,room 204,the east wing,dock B,"
    "the rear entrance,the parking deck,the green lobby,the ferry pier,gate 12,the old mill,"
    "the boat house,the clock tower,room 318,dock F,the south stairs,the tram stop,the rose garden",
    ",",
)


def _listed(values: Sequence[str]) -> tuple[int, Callable[[int], Value]]:
    return len(values), lambda i: values[i]


# {kind: (JSON type, number of values, function that returns the i-th value)}
KINDS: dict[str, tuple[str, int, Callable[[int], Value]]] = {
    "city": ("string", *_listed(CITIES)),
    "company": ("string", *_listed(COMPANIES)),
    "item": ("string", *_listed(ITEMS)),
    "topic": ("string", *_listed(TOPICS)),
    "place": ("string", *_listed(PLACES)),
    "person": ("string", 180, lambda i: f"{FIRST[i % 15]} {LAST[i // 15]}"),
    "email": (
        "string",
        720,
        lambda i: f"{FIRST[i % 15]}.{LAST[i // 15 % 12]}@{DOMAINS[i // 180]}".lower(),
    ),
    "date": ("string", 336, lambda i: f"2027-{i // 28 + 1:02d}-{i % 28 + 1:02d}"),
    "time": ("string", 144, lambda i: f"{i // 6:02d}:{i % 6}5"),
    "code": ("string", 9000, lambda i: f"{'KQRTVX'[i % 6]}{'BDFGHM'[i // 6 % 6]}-{1000 + i}"),
    # integers are split by value, so that a value of one split never occurs in the other split
    "few": ("integer", 15, lambda i: i),
    "many": ("integer", 500, lambda i: i),
    # never whole numbers, so that no number equals an integer
    "amount": ("number", 4990, lambda i: round(10 + i // 5 + (i % 5 * 10 + 25) / 100, 2)),
}

TRAIN_TOOLS = """
book_hotel: Reserve a hotel room.
    book a hotel in {city:city} for {nights:few} nights, {breakfast?with|without} breakfast
get_weather: Weather forecast of a city.
    get the weather in {city:city} on {date:date} in {unit=celsius|fahrenheit}
send_email: Send a short e-mail.
    send an e-mail to {to:email} with the subject "{subject:topic}"
create_event: Put an event in the calendar.
    create an event "{title:topic}" on {date:date} at {time:time}
find_flights: Search for flights.
    find flights from {origin:city} to {destination:city} on {date:date}
convert_money: Convert an amount between currencies.
    convert {amount:amount} from {source=EUR|USD|GBP} to {target=JPY|CHF|SEK}
track_parcel: Where a parcel is.
    track the parcel {code:code}
order_item: Order an article.
    order {quantity:few} pieces of {item:item}, {gift?gift-wrapped|not gift-wrapped}
rent_car: Rent a car.
    rent a {size=small|medium|large} car in {city:city} for {days:few} days
stock_price: Latest price of a share.
    look up the stock price of {company:company}
set_alarm: Set an alarm clock.
    set an alarm for {time:time}, {repeat?every day|only once}
add_contact: Add a person to the contacts.
    add {name:person} with the address {email:email} to my contacts
search_news: Search the news.
    search the news about {topic:topic}, at most {limit:few} articles
reserve_table: Reserve a table.
    reserve a table for {guests:few} at {time:time} in the name of {name:person}
pay_invoice: Pay an invoice.
    pay the invoice {invoice:code} of {amount:amount} euros
start_timer: Start a countdown.
    start a timer of {minutes:many} minutes
play_music: Play music.
    play {genre=jazz|folk|techno|opera} at volume {volume:few}
set_light: Switch a lamp.
    turn {power?on|off} the light in {room=kitchen|bedroom|hallway} at {level:many} percent
book_train: Book a train ticket.
    book a train to {destination:city} at {time:time} in {seat_class=first|second} class
make_note: Save a note.
    make a note about {topic:topic}, {pinned?pinned|not pinned}
transfer_money: Send money to a person.
    transfer {amount:amount} euros to {recipient:person}
check_stock: How much of an article is left.
    check whether {item:item} is available in the {city:city} store
open_ticket: Report a problem to support.
    open a ticket about {topic:topic} with {priority=low|normal|urgent} priority
close_ticket: Close a support ticket.
    close the ticket {ticket:code}, {notify?and tell|without telling} the customer
plan_route: Plan a trip.
    plan a route from {start:city} to {end:city} by {mode=bike|bus|ferry}
hire_guide: Book a city guide.
    hire a guide in {city:city} for {hours:few} hours
log_workout: Record a workout.
    log {minutes:many} minutes of {sport=rowing|running|climbing}
request_leave: Ask for days off.
    request leave from {from_date:date} for {days:few} days
ship_box: Ship a box.
    ship a box of {weight:amount} kilograms to {city:city}
apply_coupon: Use a coupon.
    apply the coupon {coupon:code} to order {order:many}
rate_seller: Rate a seller.
    rate {seller:company} with {stars:few} stars
find_recipe: Search for recipes.
    find a {diet=vegan|vegetarian|seafood} recipe for {servings:few} servings
translate_page: Translate a page.
    translate page {page:many} into {language=German|Spanish|Korean}
book_room: Book a meeting room.
    book a meeting room for {people:few} people at {time:time} on {date:date}
"""

TEST_TOOLS = """
cancel_order: Cancel an order.
    cancel the order {order:code}, {refund?with|without} a refund
loan_rate: Monthly rate of a loan.
    compute the rate of a loan of {principal:amount} over {months:many} months
invite_guest: Invite somebody.
    invite {guest:person} to {location:place} at {time:time}
water_plants: Water the garden.
    water the {zone=roses|herbs|lawn} for {minutes:many} minutes
move_meeting: Move a meeting.
    move the meeting on {topic:topic} to {new_date:date}
print_file: Print a file.
    print {copies:few} copies of {file:code}, {duplex?on both sides|on one side}
hotel_review: Post a review.
    post a {mood=glowing|mixed|harsh} review about {company:company}
ask_expert: Put a question to an expert.
    ask {expert:person} about {topic:topic}
tax_estimate: Estimate a tax.
    estimate the tax on {income:amount} in {city:city}
taxi_pickup: Order a taxi.
    order a taxi to {location:place} for {passengers:few} passengers
"""


def parse_tools(lines: str) -> list[tuple[dict[str, Any], str]]:
    """Return the signature of each tool, with its request."""
    tools = []
    rows = iter(lines.strip().splitlines())
    for heading, request in zip(rows, rows, strict=True):
        name, description = heading.split(": ", 1)
        parameters = {key: _schema(mark, text) for key, mark, text in SLOT.findall(request)}
        tool = {"name": name, "description": description, "parameters": parameters}
        tools.append((tool, request.strip()))
    return tools


def _schema(mark: str, text: str) -> dict[str, Any]:
    if mark == "=":
        return {"type": "string", "enum": text.split("|")}
    return {"type": "boolean" if mark == "?" else KINDS[text][0]}


TOOLS: dict[Split, list[tuple[dict[str, Any], str]]] = {
    "train": parse_tools(TRAIN_TOOLS),
    "test": parse_tools(TEST_TOOLS),
}


def draw_value(kind: str, split: Split, rng: Random) -> Value:
    """Return a random value of the split."""
    _, size, value_of = KINDS[kind]
    block = rng.randrange(size // TEST_EVERY) * TEST_EVERY
    place = TEST_EVERY - 1 if split == "test" else rng.randrange(TEST_EVERY - 1)
    if kind in ("few", "many") and block + place == 0:  # nobody asks for 0 of something
        place = 1
    return value_of(block + place)


def fill_request(request: str, split: Split, rng: Random) -> tuple[str, dict[str, Value]]:
    """Return the request with filled slots, and the parameters that it asks for."""
    parameters: dict[str, Value] = {}

    def fill(slot: re.Match[str]) -> str:
        key, mark, text = slot.groups()
        if mark == ":":
            parameters[key] = draw_value(text, split, rng)
            return str(parameters[key])
        choices = text.split("|")
        chosen = rng.randrange(len(choices))
        parameters[key] = chosen == 0 if mark == "?" else choices[chosen]
        return choices[chosen]

    return SLOT.sub(fill, request), parameters
