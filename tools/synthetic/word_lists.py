"""Word lists of our own from which invented names and cell values are put together.

They hold generic words and common names of people, countries and towns; nothing is taken from a
data set. It knows nothing of what is made of them.
"""


def phrases(text: str) -> list[str]:
    """'New York, Ohio' -> ['New York', 'Ohio']; line breaks count as blanks."""
    return [phrase.strip() for phrase in text.replace("\n", " ").split(",")]


GIVEN_NAMES = """
Aaron Abigail Adele Agnes Alan Alberto Alexei Alice Amara Amélie Andrew Anika Anton Arthur Astrid
Barbara Ben Bianca Björn Boris Brandon Brenda Bruno Carla Carlos Caroline Chloe Chris Claudia
Colin Craig Dagmar Damien Daniel Daria David Denise Derek Diego Dimitri Donna Dwight Edgar Elena
Elias Emeka Emil Erik Esther Eva Felix Fernando Fiona Franz Gabriel Gemma George Giulia Gordon
Grace Gustav Hana Harold Hassan Hector Helen Henrik Hiroshi Hugo Ian Ines Ingrid Ivan Jack Jamal
Jane Jasmine Javier Jean Jeff Jiří João Jorge José Josh Juan Julia Kaori Karl Katya Keith Kelly
Kenji Kevin Kim Klaus Kofi Lars Laura Leila Leo Liam Lindsay Lorenzo Lucía Luis Malik Marcel Marco
Maria Mark Martina Mehdi Michael Mika Milan Minh Monique Nadia Naomi Nathan Nick Nikola Nina Noel
Oksana Olga Oliver Omar Oscar Owen Pablo Patrick Paula Pavel Pedro Peter Petra Pierre Rachel
Rafael Rahul Ray Renata René Ricardo Rob Roger Rosa Ruth Ryan Sally Samir Sandra Scott Sean Sergei
Simon Sofia Stan Stefan Steve Susan Sven Tamara Tariq Ted Teresa Thomas Tim Todd Tomás Tyler
Ulrich Ursula Uwe Valentina Vera Viktor Vincent Walter Wayne Wendy Will Xavier Yasmin Yuki Yusuf
Zoe Zoltán Zoran
""".split()

SURNAMES = """
Abbott Adeyemi Alvarez Andersson Baptiste Barker Becker Bennett Bianchi Blake Brandt Byrne
Carlisle Castillo Chen Coleman Costa Crane Dalton Delgado Dietrich Dixon Doyle Duarte Dubois
Eastwood Ekström Ellis Farrell Fischer Fonseca Fraser Fuentes Gallagher Garner Gonçalves Goodwin
Haas Hale Hansen Hartley Haruki Hayashi Hendricks Hoffmann Horváth Hughes Ibarra Ivanov Jansen
Jarvis Jensen Kaplan Kaur Keller Khan Kim Kowalski Kozlov Lang Larkin Laurent Lindqvist Lopes
Lynch Maddox Malone Marchetti Mbeki McAllister McBride McKenna Mendes Meyer Morrow Müller Nakamura
Navarro Nkemelu Novák Nowak Núñez O'Brien O'Rourke Oduya Okafor Olsen Ortega Osborne Park Patel
Pereira Petrov Pham Pope Popescu Quinn Ramirez Reyes Rhodes Ricci Rossi Roth Saito Salazar Schmidt
Schröder Sharma Silva Singh Sokolov Stanton Sutton Suzuki Tanaka Tremblay Turner Vance Vargas
Vasquez Voss Walsh Weber Whitaker Yamada Young Zhang Zimmermann
""".split()

SURNAME_STARTS = """
Ald Ander Bar Bel Ber Bran Cal Cam Car Dal Dor Ed Fal Far Gar Gil Hal Har Hol Kal Kar Kor Lan Lin
Mar Mel Mor Nor Ol Pal Pet Rad Ros Sal San Ser Stan Tal Tor Ul Val Var Vel Wal War Win Yor Zan Zel
""".split()

SURNAME_ENDINGS = """
aković an ani ansson ard aro atos berg bury croft dale den dini dorf ellini en enko er escu estad
etti ev ez ford gate ham hardt idis ier iet ikova ini inski ka kin ley lund man mann mond more ner
nes nov off oğlu or ov ović owicz quist ri row sen sky son stad stein ström ton uchi ura vik ward
well wick worth yan
""".split()

CITIES = """
Aberdeen Adelaide Amsterdam Ankara Athens Atlanta Auckland Austin Baltimore Barcelona Belgrade
Berlin Bogotá Bordeaux Boston Brisbane Bristol Brussels Budapest Buffalo Cairo Calgary Cardiff
Casablanca Charlotte Chicago Cincinnati Cleveland Cologne Columbus Copenhagen Cork Dallas Denver
Detroit Doha Dubai Dublin Durban Edinburgh Edmonton Florence Geneva Glasgow Gothenburg Halifax
Hamburg Hanoi Helsinki Houston Indianapolis Istanbul Jakarta Johannesburg Karachi Kyoto Lagos
Leeds Leipzig Lima Lisbon Liverpool London Lyon Madrid Manchester Manila Melbourne Memphis Miami
Milan Milwaukee Minneapolis Minsk Montreal Moscow Mumbai Munich Nairobi Naples Nashville Oakland
Orlando Osaka Oslo Ottawa Paris Perth Philadelphia Phoenix Pittsburgh Portland Porto Prague Quito
Reykjavík Riga Rome Rotterdam Sacramento Salzburg Santiago Sapporo Seattle Seoul Seville Shanghai
Sheffield Singapore Sofia Stockholm Stuttgart Sydney Tallinn Tampa Tokyo Toronto Tucson Turin
Valencia Vancouver Vienna Vilnius Warsaw Wellington Winnipeg Zagreb Zürich
""".split()

TOWN_STARTS = """
Alder Amber Ash Beech Black Briar Bridge Cedar Chester Clay Cold Crest Dun East Elm Fair Fern Glen
Gran Green Hart Haw Hazel High Holly Kings Lake Lang Lark Maple Marsh Mill New North Oak Old Pine
Quarry Raven Red Rock Rose Sand Shel Silver South Spring Stan Stone Sun Thorn Wat West White Wil
Wind Wood
""".split()

TOWN_ENDINGS = """
borough bridge brook burn bury dale field ford gate ham haven hurst land leigh ley mere minster
mont mouth port ridge side stead ton vale view ville water well wick wood worth
""".split()

COUNTRIES = phrases(
    """
Albania, Algeria, Argentina, Armenia, Australia, Austria, Bahrain, Belarus, Belgium, Bolivia,
Botswana, Brazil, Bulgaria, Cameroon, Canada, Chile, China, Colombia, Costa Rica, Croatia, Cuba,
Cyprus, Czech Republic, Denmark, Ecuador, Egypt, England, Estonia, Ethiopia, Fiji, Finland,
France, Georgia, Germany, Ghana, Great Britain, Greece, Guatemala, Hong Kong, Hungary, Iceland,
India, Indonesia, Iran, Ireland, Israel, Italy, Ivory Coast, Jamaica, Japan, Jordan, Kazakhstan,
Kenya, Kuwait, Latvia, Lebanon, Lithuania, Luxembourg, Malaysia, Malta, Mexico, Moldova, Mongolia,
Morocco, Nepal, Netherlands, New Zealand, Nigeria, Northern Ireland, Norway, Pakistan, Panama,
Paraguay, Peru, Philippines, Poland, Portugal, Qatar, Romania, Russia, Scotland, Senegal, Serbia,
Singapore, Slovakia, Slovenia, South Africa, South Korea, Soviet Union, Spain, Sri Lanka, Sweden,
Switzerland, Thailand, Trinidad and Tobago, Tunisia, Turkey, Uganda, Ukraine, United Kingdom,
United States, Uruguay, Uzbekistan, Venezuela, Vietnam, Wales, West Germany, Yugoslavia, Zambia,
Zimbabwe
"""
)

STATES = phrases(
    """
Alabama, Alaska, Alberta, Arizona, Arkansas, British Columbia, California, Colorado, Connecticut,
Delaware, Florida, Georgia, Hawaii, Idaho, Illinois, Indiana, Iowa, Kansas, Kentucky, Louisiana,
Maine, Manitoba, Maryland, Massachusetts, Michigan, Minnesota, Mississippi, Missouri, Montana,
Nebraska, Nevada, New Hampshire, New Jersey, New Mexico, New South Wales, New York, North
Carolina, North Dakota, Nova Scotia, Ohio, Oklahoma, Ontario, Oregon, Pennsylvania, Quebec,
Queensland, Rhode Island, South Carolina, South Dakota, Tasmania, Tennessee, Texas, Utah, Vermont,
Victoria, Virginia, Washington, West Virginia, Wisconsin, Wyoming
"""
)

MASCOTS = """
Admirals Badgers Barons Bears Bison Bobcats Bulldogs Captains Cardinals Chargers Colonels Comets
Cougars Cowboys Crusaders Cyclones Dragons Eagles Express Falcons Flames Foxes Giants Grizzlies
Hawks Hornets Huskies Jaguars Jets Kings Knights Lions Lynx Marauders Mariners Monarchs Mustangs
Otters Owls Panthers Pilots Pioneers Pirates Raiders Rams Rangers Ravens Rockets Royals Saints
Sharks Stallions Stars Storm Thunder Tigers Titans Trojans Vikings Warriors Wildcats Wolves
""".split()

ADJECTIVES = """
ancient bitter blue bright broken cold copper crimson dark deep double early eastern emerald empty
endless faded final first forgotten frozen gentle golden grand gray hidden hollow hungry iron last
little lonely long lost lucky modern new northern old open paper perfect quiet red rising second
secret short silent silver simple southern special strange summer sweet twisted upper western
white wild winter wrong
""".split()

NOUNS = """
affair angel answer anthem autumn bargain bridge brother candle captain castle chance circle city
cloud crown dance daughter day desert diamond doctor door dream earth echo engine evening fire
flight fortune garden ghost gift girl guest harbor heart hero highway home horizon hour house
island journey judge kingdom lady lake letter light line machine man mask memory mirror money moon
morning mountain night number ocean orchard parade party path peace picture planet price promise
queen question rain reason return river road room rose saint sea season secret shadow ship sister
sky soldier song star station stone storm story stranger street summer sun teacher thief time
tower town traveler valley village voice war water wedding weekend wheel wind window winter woman
world year
""".split()

# fmt: off
CHOICES = {
    "surface": "hard, clay, grass, carpet, hard (i), carpet (i), Clay, Hard",
    "outcome":
        "winner, runner-up, Winner, Runner-up, won, lost, win, loss, nominated, Nominated, safe, "
        "eliminated, bottom two, tie, semifinals, did not qualify",
    "status":
        "active, closed, retired, scrapped, proposed, unknown, transitional, in service, "
        "preserved, destroyed, under construction, Re-elected, retired Democratic hold, lost "
        "re-election, sold, museum ship, withdrawn, demolished, abolished, renamed, completed, "
        "cancelled, contender",
    "position":
        "guard, forward, center, guard/forward, goalkeeper, midfielder, defender, quarterback, "
        "defensive back, running back, wide receiver, linebacker, tight end, offensive tackle, "
        "kicker, outside hitter, pitcher, catcher, shortstop, left wing, right wing, goaltender, "
        "SG, PF, QB, DB, LB, C, F, G, D, hooker, prop, fly-half, fullback, setter",
    "party":
        "Democratic, Republican, Liberal, Conservative, Labour, Green, Independent, Progressive, "
        "Whig, Federalist, Social Democratic, Christian Democratic, People's Party, National, "
        "Reform",
    "record_label":
        "Meridian, Northlight Records, Copperfield, Sunday Music, Echo Lane, Parallel, Bluewater, "
        "Harbour Records, Violet Door, Radiant, Castle Row, Ninth Street",
    "language":
        "English, French, Spanish, German, Italian, Russian, Japanese, Mandarin, Hindi, Arabic, "
        "Swedish, Portuguese, Turkish, Tamil, Greek, Korean, Finnish, Polish, Welsh",
    "media_format":
        'CD, LP, 7", 12", digital download, CD single, cassette, vinyl, DVD, Blu-ray, CD album',
    "genre":
        "drama, comedy, rock, pop, country, jazz, action, puzzle, role-playing, news, talk, "
        "sports, thriller, documentary, adventure, variety, horror, rhythm and blues, strategy, "
        "platform",
    "method":
        "decision (unanimous), decision (split), submission (armbar), TKO (punches), KO, "
        "submission (rear naked choke), TKO (doctor stoppage), decision (majority), KO (head "
        "kick)",
    "retired":
        "engine, accident, gearbox, suspension, brakes, +1 lap, +2 laps, transmission, collision, "
        "fuel system, clutch, oil leak, electrical, spun off, not classified, halfshaft, ignition",
    "tournament":
        "Wimbledon, US Open, Australian Open, French Open, Grand Slam, Masters, Davis Cup, "
        "Olympic Games, World Cup, European Championships, Asian Games, friendly, League Cup, FA "
        "Cup, National Championship, Champions Trophy, Pan American Games, UEFA Cup, World Junior "
        "Championships",
    "constructor":
        "Alder, Corvin, Talbot-Hale, Montero, Sabre, Ferrante, Lotus, Ridgeway, Brabant, Kestrel, "
        "Aurora, Vanguard, Marchand, Osella, Toyota, Ford, Honda, Renault, Yamaha, Suzuki, "
        "Ducati, Chevrolet",
    "engine":
        "V8, V10, V12, straight-4, straight-6, flat-12, Ford V8, Honda V6 turbo, diesel, 2.0 L "
        "I4, 1.5 l4 turbo, 3.0 V10, Alder straight-4, Montero V12, electric, hybrid, steam",
    "nationality":
        "American, British, French, German, Canadian, Australian, Swedish, Italian, Dutch, "
        "Japanese, Spanish, Irish, Polish, Mexican, Brazilian, Nigerian, Finnish, Russian",
    "school_type":
        "public, private, private/catholic, public university, state school, charter, community "
        "college, secondary, primary, high school, junior college, independent",
    "network":
        "NBC, CBS, ABC, Fox, BBC One, ITV, Channel 4, CTV, Nine Network, Seven Network, HBO, PBS, "
        "CW, independent, ESPN, TF1, NHK",
    "tennis_round":
        "1r, 2r, 3r, 4r, qf, sf, f, w, a, Q1, 2R, 3R, SF, W, A, 0 / 1, grand slam tournaments, "
        "absent",
    "golf_finish": "T6, T14, T22, cut, CUT, wd, 1, 2, T3, T40, T9, 5, DNP, 1st, T31",
    "class":
        "A, B, AA, AAA, B1, C2, SP, GT, S, 0-6-0, 4-4-0, 2-8-2, 4A, 250cc, 500cc, 125cc, GT2, "
        "LMP1, heavy, light",
    "wheels": "0-6-0, 4-6-2, 2-8-0, 2-6-4T, Bo-Bo, Co-Co, 4-4-2, 0-8-0, 2-10-0",
    "roman": "I, II, III, IV, V, VI, VII, VIII, IX, X, XI, XII, XV, XX",
    "theme":
        "love songs, Motown, the 1980s, top 10, country week, audition, group performance, movie "
        "night, big band, number ones, British invasion, first solo, disco, songs of the year",
    "manner":
        "mutual consent, resigned, sacked, end of contract, contract expired, signed by rival "
        "club, end of caretaker spell, retired, promoted to director",
    "gender": "coed, boys, girls, male, female, men, women, mixed",
    "part":
        "fuselage, propeller, hull, gearbox, wing, boiler, turbine, cabin, crankshaft, steel "
        "frame, concrete slab, timber, brick, stone, aluminium, cast iron, glass",
    "club_suffix":
        "FC, United, City, Rovers, Athletic, Town, Wanderers, Albion, SC, AC, IF, Sporting, "
        "Rangers, County, Dynamo, Olympic, RFC, Harriers",
    "month":
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December",
    "unit": "km, m, feet, ft, kg, lb, mph, km/h, mm, miles, kW, hp, MW, GHz, kb, MHz, tons, rpm",
    "ground":
        "Park, Stadium, Oval, Arena, Road, Field, Ground, Gardens, Coliseum, Center, Dome, "
        "Speedway, Hall",
    "trade":
        "Motors, Aviation, Airways, Electric, Industries, Racing, Films, Press, Engineering, "
        "Works, Energy",
    "verb":
        "Breaking, Calling, Chasing, Counting, Facing, Finding, Following, Leaving, Losing, "
        "Meeting, Saving, Stealing, Taking, Waiting for, Walking",
    "yes_no": "yes, no, Yes, No, n/a, N/A, none, partial, optional",
    "short_month": "Jan, Feb, Mar, Apr, May, Jun, Jul, Aug, Sep, Oct, Nov, Dec",
}
# fmt: on

# Kinds of words, each with the words that it may be.
WORDS = {kind: phrases(text) for kind, text in CHOICES.items()} | {
    "given_name": GIVEN_NAMES,
    "known_surname": SURNAMES,
    "surname_start": SURNAME_STARTS,
    "surname_ending": SURNAME_ENDINGS,
    "city": CITIES,
    "town_start": TOWN_STARTS,
    "town_ending": TOWN_ENDINGS,
    "country": COUNTRIES,
    "state": STATES,
    "mascot": MASCOTS,
    "adjective": ADJECTIVES,
    "noun": NOUNS,
    "Adjective": [word.title() for word in ADJECTIVES],
    "Noun": [word.title() for word in NOUNS],
    "letter": list("ABCDEFGHJKLMNPRSTVW"),
    "glyph": list("天地人山水火風雲月日花春秋城海心愛情金石大小中東西南北龍鳳"),
}
