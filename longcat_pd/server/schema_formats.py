"""The values of ``format`` that are enforced, as expressions of whole texts in the grammar library's dialect.

Each holds only texts that the format allows, if not all of them: labels of a host name have at most 30 characters, seconds
are never 60, an e-mail address has no quotes. Knows no schemas.
"""

from __future__ import annotations

_MONTH_AND_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)-02-29)"
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_HOUR_AND_MINUTE})"

_N = "[0-9]{1,9}"
_CLOCK = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,28}[A-Za-z0-9])?"
_LAST_LABEL = r"[A-Za-z](?:[A-Za-z0-9\-]{0,28}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,6}}{_LAST_LABEL}"
_ATOM = r"[A-Za-z0-9!#$%&'*+=?^_`{|}~\-]{1,20}"

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _ipv6() -> str:
    """Eight groups; or fewer, of which up to seven stand before and the rest behind the gap."""

    def groups(low: int, high: int) -> str:
        some = f"{_GROUP}(?::{_GROUP}){{{max(low, 1) - 1},{high - 1}}}" if high else ""
        return f"(?:{some})?" if low == 0 and high else some

    gaps = [f"{groups(before, before)}::{groups(0, 7 - before)}" for before in range(8)]
    return "|".join([groups(8, 8), *gaps])


_PATH = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_QUERY = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@\x{2F}?]|%[0-9A-Fa-f]{2})*"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:\x{{2F}}\x{{2F}}{_HOST}(?::[0-9]{{1,4}})?(?:\x{{2F}}{_PATH}*)*|{_PATH}+(?:\x{{2F}}{_PATH}*)*)"
    rf"(?:\?{_QUERY})?(?:\x{{23}}{_QUERY})?"
)

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|{_N}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uri": _URI,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
}
