"""The snapshot of prices, lists of the user's own, and what is refused of them."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import create_server
from threading import Event, Thread
from urllib.parse import urlsplit

import pytest

from toolkit.catalog.gpus import load_catalogue
from toolkit.catalog.prices import OLD_AFTER_DAYS, load_prices
from toolkit.cli.app import main
from toolkit.errors import SpecError

LIST = """
provider: Mine
currency: USD
date: 2026-11-01
source: https://example.org/prices
offers:
  - {instance: box, gpu: H100 SXM 80GB, gpus: 8, divisible: true, host_memory_gib: 1600, usd_per_hour: 16, spot_usd_per_hour: 8}
  - {instance: one, gpu: l4-24gb, gpus: 1, usd_per_hour: 0.5, date: 2026-01-01, source: a letter}
"""


@pytest.fixture
def listed(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(LIST)
    return path


def test_the_snapshot_names_cards_dates_and_sources():
    known = load_prices()
    catalogue = load_catalogue()
    assert {offer.provider for offer in known.offers} >= {"AWS", "Azure", "Google Cloud", "Lambda", "RunPod Secure"}
    for priced in known.offers:
        assert priced.offer.gpu in catalogue
        assert urlsplit(priced.source).scheme == "https", priced
        assert date(2026, 1, 1) <= priced.date <= date(2026, 11, 29), priced
        per_card = (priced.offer.usd_per_hour or priced.offer.spot_usd_per_hour) / priced.offer.gpus
        assert 0.1 < per_card < 20, priced
    (p5,) = [priced for priced in known.offers if priced.offer.instance == "p5.48xlarge"]
    assert (p5.offer.gpu, p5.usd_per_hour(gpus=8, spot=False), p5.host_memory_gib(8)) == ("h100-sxm-80gb", 55.04, 2048)


def test_a_part_of_a_machine_costs_its_share(listed):
    whole, single = load_prices(str(listed)).offers
    assert whole.offer.gpu == "h100-sxm-80gb"  # as the catalogue spells it
    assert whole.usd_per_hour(gpus=2, spot=False) == 4
    assert whole.usd_per_hour(gpus=4, spot=True) == 4
    assert whole.usd_per_hour(gpus=16, spot=False) is None
    assert whole.host_memory_gib(2) == 400
    assert single.usd_per_hour(gpus=1, spot=True) is None
    assert (single.date, single.source) == (date(2026, 1, 1), "a letter")


def test_old_prices_are_told_by_provider(listed):
    known = load_prices(str(listed))
    assert known.notes(known.newest) == [
        "prices of Mine were read on 2026-01-01, 304 days ago: look them up before renting"
    ]
    single = known.offers[1:]
    assert known.notes(known.oldest + timedelta(days=OLD_AFTER_DAYS), single) == []
    assert known.dated.endswith("read 2026-01-01 to 2026-11-01")
    day_before = known.newest - timedelta(days=1)
    assert known.notes(day_before)[0] == "prices of Mine are dated 2026-11-01, which is to come: check their date"


def test_a_list_is_read_from_an_address(listed):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/prices.yaml" else 404)
            self.end_headers()
            self.wfile.write(LIST.encode())

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert load_prices(f"{address}/prices.yaml").offers == load_prices(str(listed)).offers
        with pytest.raises(SpecError) as refused:
            load_prices(f"{address}/other")
        server.shutdown()
    assert refused.value.codes == ("PRICES_UNREADABLE",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 9\r\n\r\n", "has not sent all of it within 0.3 seconds"),
        (b"HTTP/1.0 200 OK\r\n\r\n", "has not sent all of it within 0.3 seconds"),
        (b"", "has not sent all of it within 0.3 seconds"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2000\r\n\r\n" + 2000 * b"x", "it has more than 1,000 bytes"),
        (b"nonsense\r\n\r\n", "nonsense"),
    ],
    ids=["body", "without an end", "no head", "too long", "no http"],
)
def test_an_address_must_send_a_list_in_time(monkeypatch, text, reason):
    """As a server that sends a byte a second: each read would be in time."""
    monkeypatch.setattr("toolkit.catalog.prices._MOST_SECONDS", 0.3)
    monkeypatch.setattr("toolkit.catalog.prices._MOST_BYTES", 1000)
    ended = Event()

    def answer():
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.recv(1000)
            connection.sendall(text)
            while not ended.wait(0.05):
                connection.sendall(b"x")

    with create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(SpecError) as refused:
                load_prices(f"http://127.0.0.1:{listening.getsockname()[1]}/prices.yaml")
        finally:
            ended.set()
            thread.join()
    (problem,) = refused.value.problems
    assert (problem.code, problem.key) == ("PRICES_UNREADABLE", "--prices")
    assert reason in problem.message
    assert "--prices FILE" in problem.fix


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        (LIST.replace("USD", "EUR", 1), "PRICES_CURRENCY", "currency=EUR"),
        (LIST.replace("l4-24gb", "l5"), "GPU_UNKNOWN", "prices.yaml, one: gpu=l5"),
        (LIST.replace("usd_per_hour: 0.5", "usd_per_hour: -1"), "PRICES_FILE", "offers.1.usd_per_hour"),
        (LIST.replace("usd_per_hour: 0.5, ", ""), "PRICES_FILE", "spot_usd_per_hour"),
        (LIST.replace("date: 2026-11-01\n", ""), "PRICES_FILE", "date"),
        ("[]", "PRICES_FILE", "no prices"),
        ("a: [", "PRICES_FILE", ""),
        ("7", "PRICES_FILE", ""),
    ],
)
def test_what_is_no_list_of_prices_is_one_error(tmp_path, text, code, words):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as refused:
        load_prices(str(path))
    assert refused.value.codes == (code,)
    assert words in str(refused.value)


def test_the_command_lists_offers_as_table_and_json(capsys, listed):
    assert main(["gpus", "--prices-from", str(listed)]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if " box " in line)
    assert row.split() == ["h100-sxm-80gb", "Mine", "box", "1–8", "1600", "–", "16.00", "2.00", "8.00", "2026-11-01"]
    assert "prices of Mine were read on 2026-01-01" in shown
    assert main(["gpus", "--prices", str(listed)]) == 0  # as `toolkit plan` spells it
    assert capsys.readouterr().out == shown
    assert main(["gpus", "--prices", "h1000"]) == 2
    assert "[GPU_UNKNOWN]" in capsys.readouterr().err
    assert main(["gpus", "--prices", "lists/mine.yaml"]) == 2
    assert "[PRICES_UNREADABLE]" in capsys.readouterr().err
    assert main(["gpus", "h100-sxm-80gb", "--prices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {offer["gpu"] for offer in found["offers"]} == {"h100-sxm-80gb"}
    assert all(offer["source"] and offer["date"] for offer in found["offers"])
    assert found["prices"]["oldest"] <= found["prices"]["newest"]
