"""Metrics: names, units and closed labels."""

import re

import pytest

from kvferry.kvops.metrics import Metrics, markdown_table

ALL = Metrics.all()


@pytest.mark.parametrize("metric", ALL, ids=[metric.name for metric in ALL])
def test_names_follow_prometheus(metric):
    assert re.fullmatch(r"kvferry:[a-z][a-z_]+", metric.name)
    assert metric.kind in ("counter", "gauge", "histogram")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
    assert (metric.buckets is not None) == (metric.kind == "histogram")
    assert list(metric.buckets or ()) == sorted(metric.buckets or ())


@pytest.mark.parametrize("metric", ALL, ids=[metric.name for metric in ALL])
def test_help_is_a_sentence_with_its_unit(metric):
    assert re.fullmatch(r"[A-Z].*, in [a-z]+( of one rank)?(: .*)?\.", metric.help)
    assert len(metric.labels) <= 2
    for label, values in metric.labels.items():
        assert label.isidentifier()
        assert 2 <= len(values) == len(set(values)) <= 6


def test_names_are_unique_and_all_are_listed():
    assert len({metric.name for metric in ALL}) == len(ALL)
    assert Metrics.LOOKUP_CHUNKS is ALL[0]
    assert len(markdown_table().splitlines()) == len(ALL) + 2


def test_series_are_a_closed_set():
    assert list(Metrics.STORED_BYTES.series()) == [()]
    assert Metrics.STORED_BYTES.at() == ()
    assert list(Metrics.LOOKUP_CHUNKS.series()) == [("hit",), ("miss",), ("pending",)]
    assert Metrics.LOOKUP_CHUNKS.at("hit") == ("hit",)
    for wrong in [(), ("maybe",), ("hit", "miss")]:
        with pytest.raises(ValueError, match="labels of kvferry:lookup_chunks_total must be from"):
            Metrics.LOOKUP_CHUNKS.at(*wrong)
