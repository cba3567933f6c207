"""Prices of rented machines: a dated snapshot in `configs/prices`, one YAML file per provider, or a list of the user's own."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Self
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from toolkit.catalog.files import configs_root
from toolkit.catalog.gpus import Gpu, find_in, load_catalogue
from toolkit.errors import Problem, SpecError, raise_all
from toolkit.io import read_text

# Days after which prices are said to be old: the spread of on-demand prices moved by some percent a month in 2026.
OLD_AFTER_DAYS = 60

# libyaml parses about ten times faster, and as safely; PyYAML may be built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_CURRENCY = "USD"
# Seconds in which an address must have sent its list, and bytes of one: many times the snapshot's, which has 13 lists of 1 to 5 KB.
_MOST_SECONDS, _MOST_BYTES = 10.0, 4 * 2**20

Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Line = Annotated[str, Field(min_length=1, max_length=400)]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Offer(_Frozen):
    """One machine that a provider rents.

    Args:
        instance: The provider's name of it.
        gpu: Card, by the name that `toolkit gpus` lists.
        gpus: Cards of the machine.
        divisible: Whether a part of the cards can be rented, at a price in proportion.
        host_memory_gib: RAM of the whole machine, GiB; None if the list does not say.
        network_gbit_per_second: Network of the machine to others of its kind; None where several cannot be joined, or the list
            does not say.
        usd_per_hour: Price of the whole machine on demand; None if it is only sold as spot.
        spot_usd_per_hour: Price of the whole machine where it may be taken away; None if the list has none.
        date: Day on which the price was read, where it differs from the list's.
        source: Where it was read, if not where the list was.
    """

    instance: Line
    gpu: Line
    gpus: PositiveInt
    divisible: bool = False
    host_memory_gib: PositiveInt | None = None
    network_gbit_per_second: Price | None = None
    usd_per_hour: Price | None = None
    spot_usd_per_hour: Price | None = None
    date: datetime.date | None = None
    source: Line | None = None

    @model_validator(mode="after")
    def _has_price(self) -> Self:
        if self.usd_per_hour is None and self.spot_usd_per_hour is None:
            raise ValueError("an offer needs usd_per_hour or spot_usd_per_hour")
        return self


class ProviderPrices(_Frozen):
    """The offers of one provider, as read on one day.

    Args:
        provider: Name of the provider.
        currency: Must be USD.
        date: Day on which the prices were read.
        source: Address at which they were read.
        note: What a user should know.
        offers: The machines.
    """

    provider: Line
    currency: Line
    date: datetime.date
    source: Line
    note: str = ""
    offers: tuple[Offer, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOffer:
    """An offer with its provider, its date and its source."""

    provider: str
    offer: Offer
    date: datetime.date
    source: str

    def usd_per_hour(self, *, gpus: int, spot: bool) -> float | None:
        """Return the price of one machine with this many cards; None where it is not rented so."""
        offer = self.offer
        price = offer.spot_usd_per_hour if spot else offer.usd_per_hour
        if price is None or gpus > offer.gpus or (gpus < offer.gpus and not offer.divisible):
            return None
        return price * gpus / offer.gpus

    def host_memory_gib(self, gpus: int) -> int | None:
        """Return the RAM that comes with this many cards, GiB; None if unknown."""
        whole = self.offer.host_memory_gib
        return None if whole is None else whole * gpus // self.offer.gpus

    def age_days(self, today: datetime.date) -> int:
        """Return the days since the price was read."""
        return (today - self.date).days

    def to_dict(self) -> dict[str, Any]:
        """Return the offer as a JSON object."""
        kept = self.offer.model_dump(mode="json", exclude={"date", "source"})
        return {"provider": self.provider, **kept, "date": self.date.isoformat(), "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """All known offers.

    Args:
        name: The snapshot, or the file or address that the user named.
        offers: Offers, by provider and as the provider's list has them.
    """

    name: str
    offers: tuple[PricedOffer, ...]

    @property
    def oldest(self) -> datetime.date:
        """Day on which the oldest price was read."""
        return min(offer.date for offer in self.offers)

    @property
    def newest(self) -> datetime.date:
        """Day on which the newest price was read."""
        return max(offer.date for offer in self.offers)

    @property
    def dated(self) -> str:
        """The list and its dates, in words."""
        days = str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"
        return f"{self.name}, read {days}"

    def of(self, gpu: str) -> tuple[PricedOffer, ...]:
        """Return the offers with a card."""
        return tuple(offer for offer in self.offers if offer.offer.gpu == gpu)

    def notes(self, today: datetime.date, offers: Iterable[PricedOffer] | None = None) -> list[str]:
        """Return one line for each provider whose prices are old, the oldest first, before them those dated after today.

        Args:
            today: The day to compare with.
            offers: Offers to look at; all if None.
        """
        shown = self.offers if offers is None else tuple(offers)
        ahead = {offer.provider: offer.date for offer in shown if offer.date > today}
        oldest: dict[str, datetime.date] = {}
        for offer in shown:
            if offer.age_days(today) > OLD_AFTER_DAYS:
                oldest[offer.provider] = min(offer.date, oldest.get(offer.provider, offer.date))
        return [
            *(
                f"prices of {provider} are dated {day}, which is to come: check their date"
                for provider, day in ahead.items()
            ),
            *(
                f"prices of {provider} were read on {day}, {(today - day).days} days ago: look them up before renting"
                for provider, day in sorted(oldest.items(), key=lambda item: item[1])
            ),
        ]


def load_prices(where: str | None = None) -> PriceList:
    """Read the snapshot of the package, or the list of a user.

    Args:
        where: A file or an address (http, https) of YAML or JSON: one provider's list as in `configs/prices`, or a sequence of
            them. None for the snapshot.

    Raises:
        SpecError: PRICES_UNREADABLE, PRICES_FILE, PRICES_CURRENCY, GPU_UNKNOWN.
    """
    if where is None:
        paths = sorted((configs_root() / "prices").glob("*.yaml"))
        texts = {path.name: path.read_text(encoding="utf-8") for path in paths}
        name = "the toolkit's snapshot"
    else:
        texts, name = {where: _fetch(where)}, where
    problems: list[Problem] = []
    offers: list[PricedOffer] = []
    catalogue = load_catalogue()
    for place, text in texts.items():
        try:
            offers += _read(place, text, catalogue)
        except SpecError as error:
            problems += error.problems
    raise_all(SpecError, problems)
    return PriceList(name=name, offers=tuple(offers))


def _fetch(where: str) -> str:
    is_address = urlsplit(where).scheme in ("http", "https")
    try:
        return _download(where).decode("utf-8") if is_address else read_text(Path(where), max_bytes=_MOST_BYTES)
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        own = (
            "Download it yourself, and name the file with --prices FILE"
            if is_address
            else "Name a file or an http(s) address"
        )
        raise SpecError.of(
            code="PRICES_UNREADABLE",
            key="--prices",
            message=f"prices={where} cannot be read: {reason}",
            fix=f"{own}; files of configs/prices show the form of a list of prices",
        ) from None


def _download(address: str) -> bytes:
    """Return what an address sends.

    Raises:
        OSError, ValueError, HTTPException: It cannot be reached, sends too much, or has not sent all in time. A socket's own limit
            is of each read alone: a server that sends a byte a second would never reach it.
    """
    outcome: list[bytes | Exception] = []

    def read() -> None:
        try:
            asked = Request(address, headers={"User-Agent": "accelerator-toolkit"})
            with urlopen(asked, timeout=_MOST_SECONDS) as answer:
                outcome.append(answer.read(_MOST_BYTES + 1))
        except Exception as error:
            outcome.append(error)

    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    if not outcome:
        raise TimeoutError(f"it has not sent all of it within {_MOST_SECONDS:g} seconds")
    (found,) = outcome
    if isinstance(found, Exception):
        raise found
    if len(found) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    return found


def _read(place: str, text: str, catalogue: dict[str, Gpu]) -> list[PricedOffer]:
    try:
        document = yaml.load(text, Loader=_LOADER)
        entries = document if isinstance(document, list) else [document]
        for entry in entries:
            _check_currency(place, entry)
        lists = [ProviderPrices.model_validate(entry) for entry in entries]
    except (yaml.YAMLError, ValidationError, RecursionError) as error:
        raise _bad_file(place, error) from None
    if not lists:
        raise _bad_file(place, ValueError("it has no prices"))
    found: list[PricedOffer] = []
    problems: list[Problem] = []
    for prices in lists:
        for offer in prices.offers:
            try:
                gpu = find_in(catalogue, offer.gpu, key="--prices", where=f"{place}, {offer.instance}: ")
            except SpecError as error:
                problems += error.problems
                continue
            found.append(
                PricedOffer(
                    provider=prices.provider,
                    offer=offer.model_copy(update={"gpu": gpu.name}),
                    date=offer.date or prices.date,
                    source=offer.source or prices.source,
                )
            )
    raise_all(SpecError, problems)
    return found


def _check_currency(place: str, entry: Any) -> None:
    currency = entry.get("currency", _CURRENCY) if isinstance(entry, dict) else _CURRENCY
    if currency != _CURRENCY:
        raise SpecError.of(
            code="PRICES_CURRENCY",
            key="--prices",
            message=f"currency={currency} in {place}: prices are compared in {_CURRENCY}, and no rate of exchange is assumed",
            fix=f"Convert the prices, and write currency: {_CURRENCY}",
        )


def _bad_file(place: str, error: Exception) -> SpecError:
    reason = str(error)
    if isinstance(error, ValidationError):
        details = error.errors(include_url=False, include_input=False)
        inner = [detail for detail in details if len(detail["loc"]) > 1]
        # Offers that are invalid leave too few, which says nothing of its own.
        shown = [each for each in details if each not in inner and not (inner and each["loc"] == ("offers",))] + inner
        reason = "; ".join(
            "it is no mapping of keys to values"
            if not detail["loc"]
            else f"{'.'.join(map(str, detail['loc']))}: {detail['msg'].removeprefix('Value error, ')}"
            for detail in shown[:3]
        )
    return SpecError.of(
        code="PRICES_FILE",
        key="--prices",
        message=f"{place} is not a list of prices: {reason}",
        fix="Write provider, currency, date, source and offers (instance, gpu, gpus, usd_per_hour) as in configs/prices/lambda.yaml",
    )
