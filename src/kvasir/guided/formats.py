"""The formats of JSON Schema as patterns, from their RFCs. A format that JSON Schema does not define is an annotation,
and constrains nothing."""

from __future__ import annotations

_YEAR = "[0-9]{4}"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|{_YEAR}-(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|{_YEAR}-02-(?:0[1-9]|1[0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]+)?"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"


def _leap_seconds() -> str:
    """Leap seconds: the last second of a day in UTC, in all time zones, whose offsets are multiples of a quarter of an
    hour. Grouped by the local hour, since long alternations are slow to compile."""
    found = [f"23:59:60{_FRACTION}[zZ]"]
    for hour in range(24):
        east, west = {0: (hour + 1) % 24, 15: hour, 30: hour, 45: hour}, 23 - hour
        zones = (
            f"{(minutes - 1) % 60}:60{_FRACTION}(?:[+]{east[minutes]:02}:{minutes:02}|-{west:02}:{-minutes % 60:02})"
            for minutes in (0, 15, 30, 45)
        )
        found.append(f"{hour:02}:(?:{'|'.join(zones)})")
    return "|".join(found)


_ZONE = f"(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"
_TIME = f"(?:{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}{_ZONE}|{_leap_seconds()})"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9a-fA-F]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"


def _ipv6() -> str:
    found = [f"(?:{_GROUP}:){{6}}{_LAST}", f"::(?:{_GROUP}:){{5}}{_LAST}"]
    for before in range(6):
        lead = f"(?:(?:{_GROUP}:){{0,{before}}}{_GROUP})?::"
        rest = 4 - before
        if rest >= 0:
            found.append(lead + (f"(?:{_GROUP}:){{{rest}}}" if rest else "") + _LAST)
    found += [f"(?:(?:{_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}", f"(?:(?:{_GROUP}:){{0,6}}{_GROUP})?::"]
    return f"(?:{'|'.join(found)})"


_IPV6 = _ipv6()
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_LABEL}(?:\.{_LABEL})*|\[(?:{_IPV4}|IPv6:{_IPV6})\])"

_BEYOND = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + "".join(
    f"{chr((plane << 16) + (0x1000 if plane == 14 else 0))}-{chr((plane << 16) + 0xFFFD)}" for plane in range(1, 15)
)


def _resources(more: str = "") -> tuple[str, str]:
    """Patterns of identifiers with a scheme, and of references, which may be relative. more: non-ASCII characters."""
    percent, plain = "%[0-9a-fA-F]{2}", rf"a-zA-Z0-9._~!$&'()*+,;={more}-"
    char = f"(?:[:@{plain}]|{percent})"
    host = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[:{plain}]+)\]|(?:[{plain}]|{percent})*)"
    authority = f"(?:(?:[:{plain}]|{percent})*@)?{host}(?::[0-9]*)?"
    absolute = f"/(?:{char}+(?:/{char}*)*)?"
    rooted = f"//{authority}(?:/{char}*)*|{absolute}"
    tail = rf"(?:\?(?:[/?:@{plain}]|{percent})*)?(?:#(?:[/?:@{plain}]|{percent})*)?"
    whole = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(?:{rooted}|{char}+(?:/{char}*)*|){tail}"
    relative = f"(?:{rooted}|(?:[@{plain}]|{percent})+(?:/{char}*)*|){tail}"
    return f"(?:{whole})", f"(?:{whole}|{relative})"


_URI, _URI_REFERENCE = _resources()
_IRI, _IRI_REFERENCE = _resources(_BEYOND)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_VARIABLE = r"(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2})(?:\.?(?:[a-zA-Z0-9_]|%[0-9a-fA-F]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&()*+,./0-9:;=?@A-Z\[\]_a-z~{_BEYOND}-]|%[0-9a-fA-F]{{2}}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

_PATTERNS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}[tT]{_TIME}",
    "email": _EMAIL, "ipv4": _IPV4, "ipv6": _IPV6,
    "uri": _URI, "uri-reference": _URI_REFERENCE, "iri": _IRI, "iri-reference": _IRI_REFERENCE,
    "uri-template": _TEMPLATE, "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}  # fmt: skip

# None: no pattern defines which texts are valid. "": llguidance has its own pattern.
FORMATS: dict[str, str | None] = {
    **{name: f"^(?:{pattern})$" for name, pattern in _PATTERNS.items()},
    **dict.fromkeys(("duration", "hostname", "uuid"), ""),
    **dict.fromkeys(("idn-email", "idn-hostname", "regex")),
}
