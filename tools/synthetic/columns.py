"""The columns of invented tables: topics with their usual columns, and columns put together freely.

`SPORTS_TOPICS` and `OTHER_TOPICS` have one family of tables a line: what a row may be called, then
its columns as `identifier:kind`. The kind is that of the cell values (values.py); it is left out
where it is the identifier itself or stands in `KIND_OF`. It knows nothing of questions.
"""

from dataclasses import dataclass
from random import Random

from tools.synthetic.values import NUMERIC_KINDS

SPORTS_TOPICS = """
game,contest | week:rank date opponent:franchise result:gridiron game_site:venue record attendance
game,match | date visitor:franchise score home:franchise leading_scorer:player_points attendance record
game | date visitor:franchise score home:franchise decision:surname attendance series:win_loss
game | game:rank date team:franchise score:basketball high_points high_rebounds high_assists location_attendance record
game | date opponent:franchise score loss save:player_record attendance record
match,game | home_team home_team_score:australian away_team away_team_score:australian venue crowd date
match,game | tie_no:rank home_team score away_team date attendance
match | date opponent:country venue score competition result:goals scorers:surname
match | team_1:club agg:goals team_2:club c_1st_leg:goals c_2nd_leg:goals
final,tournament | outcome date championship:tournament surface opponent_in_the_final:person score_in_the_final:sets
tournament,match | outcome date tournament surface partner:person opponents_in_the_final:couple score:sets
tournament | tournament c_2005:tennis_round c_2006:tennis_round c_2007:tennis_round c_2008:tennis_round c_2009:tennis_round career_sr:win_loss
tournament | date tournament winning_score:golf to_par:par margin_of_victory:measurement runner_s_up
tournament | tournament wins:count top_5:count top_10:count top_25:count events:count cuts_made:count
player,golfer | place:golf_finish player country score:golf to_par:par money_dollars:big
player,golfer | player country year_s_won:year total:count to_par:par finish:golf_finish
player | round:rank pick:rank overall:rank player position nationality club_team:club college
player | pick_number:rank player position nhl_team:franchise college_junior_club_team:college
player | player no_s:rank nationality position years_in_team:years school_club_team:college
player | name position height:measurement weight:count date_of_birth:date home_team:club college
player | player matches:count innings:count runs:count average:decimal highest_score:count c_100s:count
player | player club games_played:count rebounds:count assists:count points:count
player | rank name:person nation:country goals:count caps:count years
driver,race | driver constructor laps:count time_retired:lap_time grid:rank points:count
driver | driver team:company laps:count time_retired:retired grid:rank
rider,race | rider manufacturer:constructor laps:count time:lap_time grid:rank
race | round:rank race:circuit circuit date pole_position:person fastest_lap:person winning_driver:person winning_team:company report:phrase
race | date race_name:circuit track:circuit location winner:person second_place:person car_number:rank
season,entry | year entrant:company chassis:code engine tyre:class points:count wins:count
season | season series:tournament team:company races:count wins:count poles:count f_laps:count podiums:count position:ordinal
stage,race | stage:rank date course:place distance:measurement type:phrase winner:person general_classification:person points_classification:person
horse,race | year winner:title jockey:person trainer:person owner:person distance:measurement time:lap_time purse:money
club,team | position:rank club played:count wins:count draws:count losses:count goals_for:count goals_against:count goal_difference:par points:count
club,team | club played:count won:count drawn:count lost:count points_for:count points_against:count tries_for:count try_bonus:count losing_bonus:count
team | team outgoing_manager:person manner_of_departure:manner date_of_vacancy:date replaced_by:person position_in_table:ordinal
team,club | team location stadium:venue capacity:big head_coach:person captain:person shirt_sponsor:company
team | team conference:tournament regular_season:count tournament:count total:count last_title:year
nation,country | rank nation:country gold:count silver:count bronze:count total:count
swimmer,athlete | rank heat:rank lane:rank name:person nationality:country time:lap_time
athlete | athlete:person event:phrase country rank result:measurement notes:phrase
skater | rank name:person nation:country points:decimal places:count sp:rank fs:rank
fight,bout | res:outcome record opponent:person method event:title round:rank time:lap_time location
championship | championship:tournament current_champion:person previous_champion:person date_won:date location days_held:count
stadium,ground | stadium:venue capacity:big city:town tenant:franchise opened:year surface roof_type:part
coach | coach:person years:years wins:count losses:count win_percent:decimal bowls:count
skip,team | skip:person third:person second:person lead:person locale:place w:count l:count ends_won:count stolen_ends:count
"""  # noqa: E501

OTHER_TOPICS = """
episode | no_in_series:rank no_in_season:rank title directed_by written_by original_air_date production_code u_s_viewers_millions
episode | episode_number:rank title original_airdate:date viewers_in_millions:decimal rating:decimal share:count rank
episode | series_number:rank season_number:rank title guest:person airdate:date channel:network
show,episode | week:roman theme song_choice:title original_artist:person order_number:rank result:outcome
couple,dance | couple style:genre music:title trine:count scores:decimal total:count result:outcome
program | c_8_00:title c_8_30:title c_9_00:title c_9_30:title c_10_00:title
film,movie | year film:title director studio:company role:surname language notes:phrase
film | title original_title:title director country result:outcome year_ceremony:year
award,nomination | year award:tournament category:genre nominee:person work:title result:outcome
song | draw:rank artist song points:count place:ordinal language
single,song | year single:title album:title peak_position:rank us_chart:rank uk_chart:rank label
release,album | region:country date label format catalog
album,record | year album:title artist label sales:big certification:class
actor,role | character:person portrayed_by:person first_appearance:title last_appearance:title duration:years
station | call_sign frequency_mhz:frequency city_of_license:place erp_w:big facility_id:big fcc_info:code
station,channel | station:callsign channel:rank owner:company affiliation:network city:place owned_since:year
channel,service | television_service:title country language content:genre package_option:title hdtv:yes_no
school,institution | institution location founded:year type:school_type enrollment:big nickname:mascot joined:year conference:tournament
school | name:college years:years gender area:town authority:status decile:rank roll:big
school | school:college location mascot county:town ihsaa_class:class year_joined:year previous_conference:tournament
district,election | district incumbent party first_elected:year result:status candidates:couple
party,election | party:party leader:person votes:big percent_votes:percent seats:count change:par
poll | poll_source:company dates_administered:date democrat:percent republican:percent undecided:percent lead_margin:count
governor,senator | name:person took_office:date left_office:date party:party district:district residence:place
county | county:town democratic_percent:percent republican_percent:percent votes_cast:big margin:big
referendum | date question:phrase yes_percent:percent no_percent:percent turnout:percent passed:yes_no
village,municipality | official_name:town status area_km_2:decimal population:big census_ranking:code county:town
province,region | province:state capital:town population_2011:big area_km:big density_per_km:decimal governor:person
city | rank city:town airport:venue passengers:big change_percent:percent iata:code icao:code
settlement | name_of_town:town original_name:town county:town elevation_m:count language majority:nationality
mountain,peak | peak:title location elevation_ft:big prominence_m:big range:town first_ascent:year
river,bridge | name:title river:town length:measurement opened:year type:phrase crosses:town
building,tower | rank name:venue location height_m:decimal floors:count completed:year architect:surname
station,railway | station:town line:title opened:year platforms:count zone:rank annual_usage:big
locomotive | class wheel_arrangement:wheels builder:company year_built:year fleet_numbers:years withdrawn:year quantity_made:count
locomotive | number:rank name:title built:date works:company notes:phrase
ship,vessel | ship:title builder:company laid_down:date launched:date commissioned:date fate:status displacement:measurement
ship,boat | name:title length:measurement guests:count year_built:year flag:country owner:company
aircraft | model:code engine power:measurement top_speed_km_h:count introduced:year range:measurement
aircraft,airline | aircraft:code in_service:count orders:count passengers:big notes:phrase
satellite,launch | date_of_launch:date mission:title launch_site:venue payload:title outcome:status mass_kg:big
car,vehicle | model:code engine displacement:measurement power:measurement torque:measurement years:years
processor | model_number:code sspec_number:code frequency:measurement l2_cache:measurement socket:code release_price_usd:money
game,title | game:title developer:company release_date:date platform:code genre score:decimal
software,browser | name:title license:class first_release:date latest_version:decimal developer:company windows:yes_no
company | rank company industry:genre headquarters:place revenue_billions:decimal employees:big market_value:money
drug,product | name:title brand_name:title type:phrase approved:year manufacturer:company dose:measurement
element,compound | name:title formula:code melting_point:decimal boiling_point:decimal density:measurement discovered:year
species,plant | species:title authority:surname family:title region:country status:yes_no length_mm:decimal
war,battle | name_of_the_war:title commander:person date result:status casualties:big location
ruler,king | name:person reign:years born:date died:date father:person spouse:person
law,case | case_:title decided:date judge:person vote:win_loss author:surname subject:phrase
book,novel | author:person title year publisher:company pages:count series:title
contestant | contestant:person age:rank hometown:place occupation:phrase finish:ordinal votes:count
contestant,state | state interview:decimal swimsuit:decimal evening_gown:decimal average:decimal
year,period | year population_total:big births:big deaths:big natural_change:par fertility_rate:decimal
year | year tourists_thousands:big domestic_freight:measurement passengers:big change:percent
language,word | english:phrase latin:title meaning:phrase pronunciation:surname group_:language
disaster,accident | disaster:title type:phrase location:place deaths:count date cause:part
"""  # noqa: E501

KIND_OF = {
    "institution": "college", "name": "person", "season": "year", "team": "club",
    "player": "person", "driver": "person", "rider": "person", "director": "person",
    "directed_by": "person", "written_by": "person", "artist": "person", "incumbent": "person",
    "runner_s_up": "person", "home_team": "club", "away_team": "club", "attendance": "big",
    "crowd": "big", "score": "goals", "record": "win_loss", "competition": "tournament",
    "location": "place", "original_air_date": "date", "production_code": "code", "song": "title",
    "u_s_viewers_millions": "decimal", "label": "record_label", "format": "media_format",
    "catalog": "code", "call_sign": "callsign", "high_points": "player_points",
    "high_rebounds": "player_points", "high_assists": "player_points", "loss": "player_record",
    "location_attendance": "venue_attendance",
}  # fmt: skip

HEADERS = {
    "u_s_viewers_millions": "U.S. viewers (millions)", "no_in_series": "No. in series",
    "no_in_season": "No. in season", "pick_number": "Pick #", "no_s": "No.(s)",
    "runner_s_up": "Runner(s)-up", "school_club_team": "School/Club Team", "to_par": "To par",
    "college_junior_club_team": "College/junior/club team", "time_retired": "Time/Retired",
    "location_attendance": "Location Attendance", "year_s_won": "Year(s) won", "tie_no": "Tie no",
    "percent_votes": "% votes", "order_number": "Order #", "car_number": "Car #", "erp_w": "ERP W",
    "fcc_info": "FCC info", "frequency_mhz": "Frequency MHz", "nhl_team": "NHL team",
    "icao": "ICAO", "iata": "IATA", "money_dollars": "Money ($)",
    "top_speed_km_h": "Top speed (km/h)",
    "win_percent": "Win %", "us_chart": "US chart", "uk_chart": "UK chart", "f_laps": "F/Laps",
    "c_8_00": "8:00", "c_8_30": "8:30", "c_9_00": "9:00", "c_9_30": "9:30", "c_10_00": "10:00",
    "l2_cache": "L2 cache", "hdtv": "HDTV", "year_ceremony": "Year (Ceremony)", "sp": "SP",
    "career_sr": "Career SR", "area_km_2": "Area (km 2 )", "ihsaa_class": "IHSAA Class", "fs": "FS",
}  # fmt: skip

NUMBER_MODIFIERS = """
total average annual maximum minimum net gross estimated urban rural domestic international
combined adjusted official career first second final
""".split()

NUMBER_NOUNS = """
population:big area:decimal length:count height:decimal speed:count seats:count passengers:big
production:big revenue:decimal budget:big votes:big distance:decimal sales:big elevation:count
depth:decimal width:decimal weight:count rainfall:decimal members:big wins:count students:big
goals:count points:count matches:count starts:count rank:rank rating:decimal deaths:count age:rank
laps:count games:count yards:count tackles:count attempts:count appearances:count visitors:big
area_km_2:decimal area_acres:big length_m:decimal length_ft:count length_km:decimal
height_m:decimal height_ft:count speed_km_h:count distance_km:decimal weight_kg:count
weight_lbs:count power_mw:decimal frequency_khz:count depth_m:decimal width_mm:decimal
elevation_ft:big revenue_millions:decimal sales_thousands:big rainfall_mm:decimal
density_per_km:decimal money_dollars:big percent_of_total:decimal
""".split()

TEXT_MODIFIERS = """
official international first second original former current previous home away english french
local mens womens new final secondary primary main regular national world japanese
""".split()

TEXT_NOUNS = """
name:title type:phrase status:status description:phrase notes:phrase remarks:phrase origin:place
category:genre code:code version:decimal platform:code language:language author:person
owner:company operator:company sponsor:company winner:person leader:person singles:person
doubles:couple champion:club chairman:surname host:person site:venue title:title coach:person
date:date result:outcome team:club city:town region:state name:person chinese_title:chinese_title
nickname:mascot time:clock price:money percentage:percent class:class size:measurement
score:win_loss school:college country:country reason:phrase function:phrase comments:phrase
material:part
""".split()


@dataclass(frozen=True)
class Column:
    """A column: `identifier` in SQL, `header` as people write it, `kind` of its cell values."""

    identifier: str
    header: str
    kind: str

    @property
    def numeric(self) -> bool:
        return self.kind in NUMERIC_KINDS


@dataclass(frozen=True)
class Topic:
    """A family of tables. `subjects`: what a row may be called; `columns`: in table order."""

    subjects: tuple[str, ...]
    columns: tuple[Column, ...]


def parse_column(text: str) -> Column:
    """'c_1st_leg:goals' -> Column('c_1st_leg', '1st leg', 'goals'); see `KIND_OF`."""
    identifier, _, kind = text.partition(":")
    spoken = identifier.removeprefix("c_").rstrip("_").replace("_", " ")
    header = HEADERS.get(identifier, spoken[0].upper() + spoken[1:])
    return Column(identifier, header, kind or KIND_OF.get(identifier, identifier))


def parse_topics(text: str) -> list[Topic]:
    """The topics of a text with one of them a line: 'subject,subject | column column:kind ...'."""
    topics = []
    for line in text.strip().splitlines():
        subjects, columns = line.split(" | ")
        topics.append(Topic(tuple(subjects.split(",")), tuple(map(parse_column, columns.split()))))
    return topics


def free_column(rng: Random, numeric: bool) -> Column:
    """A column put together from parts: 'gross_sales_1998', 'original_title', 'c_1998'."""
    if rng.random() < 0.08:
        kind = "count" if numeric else rng.choice(("tennis_round", "ordinal", "percent", "big"))
        return parse_column(f"c_{rng.randint(1960, 2013)}:{kind}")
    if not numeric:
        noun, kind = rng.choice(TEXT_NOUNS).split(":")
        lead = rng.choice(TEXT_MODIFIERS) + "_" if rng.random() < 0.6 else ""
        return parse_column(f"{lead}{noun}:{kind}")
    noun, kind = rng.choice(NUMBER_NOUNS).split(":")
    lead = rng.choice(NUMBER_MODIFIERS) + "_" if rng.random() < 0.5 else ""
    year = f"_{rng.randint(1980, 2013)}" if rng.random() < 0.15 else ""
    return parse_column(f"{lead}{noun}{year}:{kind}")


SPORTS, OTHERS = parse_topics(SPORTS_TOPICS), parse_topics(OTHER_TOPICS)
