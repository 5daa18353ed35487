"""The language of the packets in `mqtt.json` and `mqtt_hub.json`; README.md describes it."""

from __future__ import annotations

KEPT = bytes.fromhex("05 11 00 00 00 64")
LIMITS = bytes.fromhex("0b 21 00 14 27 00 10 00 00 22 00 0a")
_SHORT = {
    "C": "10: M V 02 00 00 P '{}'",
    "K": "10: M V 00 00 00 E '{}'",
    "A": "20: 00 00 L",
    "A1": "20: 3:00 4:01 5:01 00 L",
}


def varint(number: int) -> bytes:
    number, low = divmod(number, 128)
    return bytes((low | (128 if number else 0),)) + (varint(number) if number else b"")


def data_of(script: str, version: int) -> bytes:
    """The bytes of packets, as README.md says."""
    return b"".join(packets_of(script, version))


def packets_of(script: str, version: int) -> list[bytes]:
    """The packets of a script, without those of other versions."""
    found = []
    for one in script.split(" / ") if script else []:
        only, bar, rest = one.strip().partition("| ")
        if not bar:
            found.append(packet_of(one.strip(), version))
        elif str(version) in only:
            found.append(packet_of(rest, version))
    return found


def packet_of(script: str, version: int) -> bytes:
    word, _, rest = script.partition(" ")
    script = _SHORT[word].format(rest) if word in _SHORT else script
    first, *words = script.split()
    if first[-1] != ":":
        return group([first, *words], version)
    data = group(words, version)
    return bytes.fromhex(first[:-1]) + varint(len(data)) + data


def group(words: list[str], version: int) -> bytes:
    data = b""
    while words:
        word = words.pop(0)
        if word == "{":
            depth, inner = 1, []
            while depth:
                inner.append(words.pop(0))
                depth += (inner[-1] == "{") - (inner[-1] == "}")
            block = group(inner[:-1], version)
            data += varint(len(block)) + block
        else:
            data += value(word, version)
    return data


def value(word: str, version: int) -> bytes:
    text, star, count = word.rpartition("*")
    if star and count.isdigit():
        return repeated(text, int(count), version)
    if word in _WORDS:
        return _WORDS[word](version)
    if word[1:2] == ":":
        return value(word[2:], version) if word[0] == str(version) else b""
    if word[0] == "'":
        raw = word[1:-1].encode()
        return len(raw).to_bytes(2) + raw
    return word[1:].encode() if word[0] == "~" else bytes.fromhex(word)


def repeated(text: str, count: int, version: int) -> bytes:
    """A string whose text is repeated, or bytes that are."""
    if text[0] == "'":
        raw = text[1:-1].encode() * count
        return len(raw).to_bytes(2) + raw
    return value(text, version) * count


_WORDS = {
    "V": lambda version: bytes((version,)),
    "P": lambda version: b"\0" if version == 5 else b"",
    "M": lambda version: b"\0\6MQIsdp" if version == 3 else b"\0\4MQTT",
    "E": lambda version: KEPT if version == 5 else b"",
    "L": lambda version: LIMITS if version == 5 else b"",
}
