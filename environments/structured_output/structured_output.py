"""Fields of a short text as a JSON object of a given form: four levels, graded by field."""

from __future__ import annotations

import json
import random
import re
import zlib
from typing import Any, NamedTuple

import verifiers as vf

__all__ = ["fields", "load_environment"]

INSTRUCTION = "Write each text as a JSON object of this form, and nothing else: {form}"
LONGEST_ANSWER, MOST_ROWS = 4000, 100_000
BETWEEN = " / "

Path = tuple[str | int, ...]
"""Keys and indices from the whole object down to one value."""


class Domain(NamedTuple):
    """A subject of texts; templates are separated by " / ", and the last quarter of them is for evaluation alone."""

    groups: dict[str, list[str]]
    """Key of a nested object to the fields in it."""
    values: dict[str, Any]
    """Field to its values: words, a range, bool, or a tuple of words to take two or three from."""
    texts: str
    """Sentences with every field that is a string."""
    clauses: dict[str, str]
    """Every other field to sentences about it; of a bool each is "if true|if false"."""


SENDERS = "Adam Alice Ben Carla Daniel Emma Felix Grace Henry Julia Leo Lucy"
RECEIVERS = "Ivan Karen Maria Nina Omar Paul Rosa Ruth Sam Sofia Tom Victor"
NAMES = f"{SENDERS} {RECEIVERS}"
CITIES = "Berlin Boston Cairo Chicago Dallas Delhi Dublin London Madrid Miami Moscow Paris Prague Rome Seattle Tokyo"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"

DOMAINS = [
    Domain(
        {"customer": ["name", "city"], "order": ["item", "count", "gift", "extras"]},
        {"name": NAMES, "city": CITIES, "count": range(2, 10), "gift": bool,
         "item": "bag bike camera chair clock desk guitar jacket lamp mirror phone sofa table tent watch",
         "extras": ("batteries", "cable", "case", "cover", "manual", "stickers")},
        "{name} from {city} ordered a {item}. / A {item} was ordered by {name} in {city}. / "
        "{name} wants a {item} sent to {city}. / In {city}, {name} bought a {item}. / "
        "The {item} goes to {city}, where {name} lives. / We sold a {item} to {name} of {city}. / "
        "There is a new order from {city}: a {item} for {name}. / "
        "{city} gets one more {item}, for which {name} paid. / "
        "Order of {name}: a {item}, to be delivered in {city}. / {name} called from {city} to get a {item}. / "
        "Please send a {item} to {name} in {city}. / Our customer {name}, who lives in {city}, asks for a {item}.",
        {"count": "Make it {count} of them. / The number is {count}. / We need {count} in all.",
         "gift": "It is a gift.|It is not a gift. / Wrap it as a gift.|Do not wrap it as a gift. / "
                 "This one is a gift.|This one is no gift.",
         "extras": "Add {extras}. / It comes with {extras}. / Also pack {extras}."},
    ),
    Domain(
        {"patient": ["name", "day"], "visit": ["doctor", "hour", "urgent", "tests"]},
        {"name": NAMES, "day": DAYS, "hour": range(8, 18), "urgent": bool,
         "doctor": "Baker Brown Carter Cooper Fisher Green Hill Jones King Lee Miller Parker Smith Young",
         "tests": ("blood", "eyes", "hearing", "heart", "lungs", "skin")},
        "{name} will see Doctor {doctor} {day}. / Doctor {doctor} sees {name} {day}. / "
        "{day}, {name} has an appointment with Doctor {doctor}. / Book {name} with Doctor {doctor} for {day}. / "
        "The next patient of Doctor {doctor} is {name}, who comes {day}. / "
        "{name} was told to visit Doctor {doctor} {day}. / {day} is the day when Doctor {doctor} examines {name}. / "
        "Visit {day}: {name}, treated by Doctor {doctor}. / Doctor {doctor} moved the visit of {name} to {day}. / "
        "We expect {name} {day}, and Doctor {doctor} will be there. / "
        "For {day}, put {name} down for Doctor {doctor}. / Doctor {doctor} is free {day}, so {name} comes then.",
        {"hour": "It begins at {hour} o'clock. / Come at {hour} o'clock. / The hour is {hour} o'clock.",
         "urgent": "It is urgent.|It is not urgent. / This is urgent.|This is not urgent. / "
                   "The case is urgent.|The case is not urgent.",
         "tests": "Tests: {tests}. / They will test {tests}. / To be tested: {tests}."},
    ),
    Domain(
        {"person": ["name", "age", "married"], "life": ["city", "job", "languages"]},
        {"name": NAMES, "city": CITIES, "age": range(19, 80), "married": bool,
         "job": "baker cook dentist driver farmer judge lawyer nurse painter pilot singer teacher waiter",
         "languages": ("Arabic", "Chinese", "English", "French", "German", "Spanish")},
        "{name} is a {job} in {city}. / {name} lives in {city} and works as a {job}. / "
        "The {job} {name} lives in {city}. / In {city}, {name} found work as a {job}. / "
        "Everyone in {city} knows the {job} {name}. / {name} moved to {city} to be a {job}. / "
        "A {job} by trade, {name} calls {city} home. / {city} needs a {job}, and {name} is one. / "
        "As a {job}, {name} earns good money in {city}. / {name} of {city} trained as a {job}. / "
        "Meet {name}, a {job} from {city}. / {city} is where {name} became a {job}.",
        {"age": "{name} is {age} years old. / The age is {age}. / At {age}, {name} is still learning.",
         "married": "{name} is married.|{name} is not married. / Married: yes.|Married: no. / "
                    "As to being married, yes.|As to being married, no.",
         "languages": "Languages: {languages}. / {name} speaks {languages}. / {name} can read {languages}."},
    ),
    Domain(
        {"report": ["reporter", "day"], "bug": ["page", "users", "solved", "browsers"]},
        {"reporter": NAMES, "day": DAYS, "users": range(2, 100), "solved": bool,
         "page": "account billing calendar cart chat contact help home login map news profile search",
         "browsers": ("Brave", "Chrome", "Edge", "Firefox", "Opera", "Safari")},
        "{reporter} reported {day} that the {page} page is broken. / {day}, {reporter} found a bug in the {page} "
        "page. / The {page} page crashed {day}, says {reporter}. / A bug in the {page} page was reported by "
        "{reporter} {day}. / The {page} page has a bug, which {reporter} noticed {day}. / "
        "{day} brought a complaint from {reporter} about the {page} page. / "
        "When {reporter} opened the {page} page {day}, it froze. / "
        "Bug of {day}: the {page} page, seen by {reporter}. / "
        "According to {reporter}, the {page} page was empty {day}. / "
        "{reporter} could not use the {page} page {day}. / {reporter} wrote {day}: the {page} page does not load. / "
        "Since {day} the {page} page fails, as {reporter} tells us.",
        {"users": "It hit {users} users. / {users} users saw it. / So far {users} users complained.",
         "solved": "It is solved.|It is not solved. / Solved: yes.|Solved: no. / Now it is solved.|Still not solved.",
         "browsers": "Browsers: {browsers}. / It happens in {browsers}. / Seen in {browsers}."},
    ),
    Domain(
        {"route": ["sender", "receiver", "city"], "parcel": ["weight", "fragile", "contents"]},
        {"sender": SENDERS, "receiver": RECEIVERS, "city": CITIES, "weight": range(1, 31), "fragile": bool,
         "contents": ("books", "candles", "cups", "honey", "shoes", "toys")},
        "{sender} sent a parcel to {receiver} in {city}. / To {city}: a parcel for {receiver}, sent by {sender}. / "
        "A parcel from {sender} is on its way to {receiver} in {city}. / "
        "{receiver} in {city} gets a parcel from {sender}. / "
        "In {city} a parcel arrived for {receiver}, and the sender is {sender}. / "
        "{receiver} picked up in {city} what {sender} had sent. / "
        "{sender} shipped a box, which {receiver} received in {city}. / "
        "Deliver this to {receiver}, {city}, with greetings from {sender}. / "
        "The box for {receiver} left {sender} and reached {city}. / "
        "{sender} paid the postage to {city}, and {receiver} says thanks. / "
        "The parcel that {sender} mailed to {receiver} went to {city}. / "
        "In {city}, {receiver} waits for the parcel of {sender}.",
        {"weight": "It weighs {weight} kg. / The weight is {weight} kg. / The scales show {weight} kg.",
         "fragile": "It is fragile.|It is not fragile. / Fragile: yes.|Fragile: no. / "
                    "Treat it as fragile.|There is nothing fragile in it.",
         "contents": "It contains {contents}. / Inside: {contents}. / We packed {contents}."},
    ),
]  # fmt: skip


def sample_fields(rng: random.Random, domain: Domain, level: int) -> list[str]:
    strings = [name for name in domain.values if name not in domain.clauses]
    count, typed = {1: (rng.choice([2, 3]), 0), 2: (1, 2), 3: (rng.choice([2, 3]), 1), 4: (3, 3)}[level]
    return rng.sample(strings, count) + rng.sample(list(domain.clauses), typed)


def sample_value(rng: random.Random, values: Any, level: int) -> Any:
    if isinstance(values, tuple):
        some = rng.sample(values, 2 if level < 4 else rng.choice([2, 3]))
        return some if level < 4 else [{"name": one, "amount": rng.randint(2, 9)} for one in some]
    return rng.random() < 0.5 if values is bool else rng.choice(values.split() if isinstance(values, str) else values)


def type_of(values: Any, level: int) -> str:
    several = '[{"name": string, "amount": integer}]' if level == 4 else "[string]"
    name = {str: "string", tuple: several, type: "boolean"}.get(type(values), "integer")
    return f"{name} or null" if level == 4 and name != "string" else name


def in_words(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    *first, last = [one if isinstance(one, str) else f"{one['amount']} {one['name']}" for one in value]
    return f"{', '.join(first)} and {last}"


def make_text(
    rng: random.Random, domain: Domain, names: list[str], level: int, held_out: bool
) -> tuple[str, dict[str, Any]]:
    """Return a text, and the values of its named fields; a quarter of all combinations of values is held out."""

    def say(templates: str) -> str:
        every = templates.split(BETWEEN)
        kept = len(every) * 3 // 4
        return rng.choice(every[kept:] if held_out else every[:kept])

    typed = [name for name in names if name in domain.clauses]
    silent_about = rng.choice(typed) if level == 4 else None
    asked: dict[str, Any] = {}
    while not asked or (zlib.crc32(json.dumps(asked, sort_keys=True).encode()) % 4 == 0) != held_out:
        values = {name: sample_value(rng, pool, level) for name, pool in domain.values.items()}
        asked = {name: None if name == silent_about else values[name] for name in names}
    sentences = [say(domain.texts)]
    for name in typed:
        if name != silent_about:
            sentences.append(say(domain.clauses[name]).split("|")[asked[name] is False])
    return " ".join(sentences).format(**{name: in_words(value) for name, value in values.items()}), asked


def nested(flat: dict[str, Any], domain: Domain, level: int) -> dict[str, Any]:
    if level < 3:
        return flat
    groups = {group: {name: flat[name] for name in flat if name in below} for group, below in domain.groups.items()}
    return {group: inner for group, inner in groups.items() if inner}


def make_row(rng: random.Random, level: int, examples: int, held_out: bool) -> dict[str, Any]:
    # the last has two names to tell apart
    domain = rng.choice(DOMAINS if level > 1 else DOMAINS[:-1])
    names = sample_fields(rng, domain, level)
    form = json.dumps(nested({name: name for name in names}, domain, level))
    for name in names:
        form = form.replace(f'"{name}": "{name}"', f'"{name}": {type_of(domain.values[name], level)}')
    texts: dict[str, str] = {}
    while len(texts) <= examples:
        text, asked = make_text(rng, domain, names, level, held_out)
        texts.setdefault(json.dumps(nested(asked, domain, level)), text)
    prompt = [{"role": "system", "content": INSTRUCTION.format(form=form)}]
    for answer, text in texts.items():
        prompt += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return {"prompt": prompt[:-1], "answer": answer}


def make_rows(count: int, seed: str, level: int, examples: int, held_out: bool) -> list[dict[str, Any]]:
    """Return rows that differ in the form or in the text that is asked."""
    rng, rows = random.Random(seed), dict[tuple[str, str], dict[str, Any]]()
    while len(rows) < count:
        row = make_row(rng, level, examples, held_out)
        rows[row["prompt"][0]["content"], row["prompt"][-1]["content"]] = row
    return list(rows.values())


def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def leaves(value: Any, path: Path = ()) -> dict[Path, str]:
    """Return what holds no further value, as JSON text: 3, 3.0, true and "3" all differ, and an empty list counts."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = {where: leaf for key, below in inner for where, leaf in leaves(below, (*path, key)).items()}
    return found or {path: json.dumps(value, allow_nan=False)}


def fields(text: str) -> dict[Path, str]:
    """Return every value of a JSON object, by its path; {} where the text is no object.

    A fence around the object is taken off, and nothing else may stand beside it. A key that stands twice, NaN, and
    more than 4,000 characters make it no object.
    """
    fenced = re.fullmatch(r"```(?:json)?\n(.*)\n```", text[:LONGEST_ANSWER].strip(), re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else text[: LONGEST_ANSWER + 1], object_pairs_hook=checked)
        return leaves(found) if isinstance(found, dict) and len(text) <= LONGEST_ANSWER else {}
    except (ValueError, RecursionError):
        return {}


def field_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return the share of fields that are right, of those wanted or those given, whichever are more."""
    found, wanted = parser.parse_answer(completion) or {}, fields(answer)
    return sum(found.get(path) == value for path, value in wanted.items()) / max(len(found), len(wanted))


def exact_match(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where every field is right and there is no other."""
    return float(parser.parse_answer(completion) == fields(answer))


def valid_json(parser: vf.Parser, completion: vf.Messages) -> float:
    """Return 1.0 for a JSON object, whatever is in it."""
    return float(bool(parser.parse_answer(completion)))


def load_environment(
    level: int = 1, examples: int = 1, num_train: int = 2000, num_eval: int = 200, seed: int = 0
) -> vf.Environment:
    """Build the environment.

    Args:
        level: 1 for two or three flat strings of different kinds; 2 for integers, booleans, lists and two names too;
            3 for nested objects; 4 for six fields, lists of objects, and null for what the text does not say.
        examples: texts that stand with their objects before the one that is asked, from 0 to 4.
        num_train: training prompts.
        num_eval: evaluation prompts; they share no sentence template and no object with training prompts, their
            examples included, and do not depend on `num_train`.
        seed: chooses the prompts.

    Raises:
        vf.ConfigError: no such level, more than 4 examples, or more than 100,000 prompts.
    """
    if level not in (1, 2, 3, 4) or examples not in range(5):
        raise vf.ConfigError(f"level={level!r} must be 1, 2, 3 or 4, and examples={examples!r} from 0 to 4.")
    if not (1 <= num_train <= MOST_ROWS and 1 <= num_eval <= MOST_ROWS):
        raise vf.ConfigError(f"num_train={num_train} and num_eval={num_eval} must be from 1 to {MOST_ROWS}.")
    parser = vf.MaybeThinkParser(fields)
    return vf.SingleTurnEnv(
        dataset=make_rows(num_train, f"train {seed}", level, examples, held_out=False),
        eval_dataset=make_rows(num_eval, f"eval {seed}", level, examples, held_out=True),
        parser=parser,
        rubric=vf.Rubric(funcs=[field_match, exact_match, valid_json], weights=[1.0, 0.0, 0.0], parser=parser),
        # room for a thought; a small model may never end
        sampling_args={"max_tokens": 1024},
    )
