"""Options of format("smq"): each mistake is one sentence that names the option and the rule."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from smqrt.errors import ArgumentError
from smqrt.pipeline.smq_source.options import ReadOptions, WriteOptions, epoch_us, time_us

NOW = "2026-11-21T15:00:00"


def read(**given: str) -> ReadOptions:
    return ReadOptions.parse(CaseInsensitiveDict({"path": "/tmp/journal"} | given))


def test_option_names_are_case_insensitive_as_in_spark() -> None:
    options = read(MAXROWSPERTRIGGER="10", startingoffsets="earliest", failOnDataLoss="FALSE")
    assert (options.max_rows, options.starting, options.fail_on_data_loss) == (10, "earliest", False)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("startingOffset", "startingOffsets"),
        ("maxRowPerTrigger", "maxRowsPerTrigger"),
        ("startTimestamp", "startingTimestamp"),
        ("subscribe", "topics"),
        ("kafka.bootstrap.servers", "url"),
    ],
)
def test_unknown_options_are_named_with_the_nearest_names(given: str, near: str) -> None:
    there = f'no option "{given.lower()}" here. Did you mean {near}\\? It has: .*startingOffsets, startingTime'
    with pytest.raises(ArgumentError, match=there):
        read(**{given: "earliest"})
    with pytest.raises(ArgumentError, match='no option "xyz" here. It has:'):
        read(xyz="1")


def test_options_have_the_names_of_kafkas_source_too() -> None:
    options = read(maxOffsetsPerTrigger="10", startingTimestamp="1795273200000", endingTimestamp=NOW)
    assert (options.max_rows, options.starting_us, options.ending_us) == (10, 1_795_273_200_000_000, time_us("", NOW))
    with pytest.raises(ArgumentError, match="maxRowsPerTrigger and maxOffsetsPerTrigger have the same meaning"):
        read(maxRowsPerTrigger="10", maxOffsetsPerTrigger="10")
    with pytest.raises(ArgumentError, match="startingOffsets and startingTime exclude each other"):
        read(startingOffsets="earliest", startingTimestamp="1795273200000")


def test_sizes_have_units() -> None:
    options = read(maxBytesPerTrigger="64MB", bytesPerPartition="1000000", minPartitions="4")
    assert (options.max_bytes, options.bytes_per_partition, options.min_partitions) == (64_000_000, 1_000_000, 4)


def test_a_repeated_write_needs_both_names() -> None:
    given = {"path": "/tmp/journal", "txnAppId": "nightly", "txnVersion": "7"}
    options = WriteOptions.parse(CaseInsensitiveDict(given))
    assert (options.app_id, options.version) == ("nightly", 7)
    with pytest.raises(ArgumentError, match="txnAppId and txnVersion need each other"):
        WriteOptions.parse(CaseInsensitiveDict({"path": "/tmp/journal", "txnVersion": "7"}))


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("maxRowsPerTrigger", "0", "whole number of at least 1"),
        ("maxBytesPerTrigger", "much", "size like 64MB"),
        ("bytesPerPartition", "0", "at least 1 byte"),
        ("minPartitions", "0", "whole number of at least 1"),
        ("rowsPerPartition", "many", "whole number of at least 1"),
        ("batchRows", "-1", "whole number of at least 1"),
        ("startingOffsets", "newest", 'such as {"n1": 12345}'),
        ("startingOffsets", '{"n1": -2}', 'such as {"n1": 12345}'),
        ("startingOffsets", '{"n1": true}', 'such as {"n1": 12345}'),
        ("splitAt", "[1]", 'such as {"n1": 12345}'),
        ("startingTime", "yesterday", "2026-11-21T15:00:00Z, or 2h"),
        ("startingTime", "2 parsecs", "duration like 30s or 2h"),
        ("failOnDataLoss", "no", '"true" or "false"'),
        ("includePipeline", "1", '"true" or "false"'),
        ("topics", '["a"', "JSON list"),
        ("topics", "[1]", "every element"),
        ("topics", "a/#/b", "'#' inside"),
        ("retry", "soon", "duration like 30s or 2h"),
        ("token", "", "must not be empty"),
    ],
)
def test_a_wrong_value_is_named_with_the_rule(option: str, value: str, rule: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read(**{option: value})
    assert rule in str(caught.value)


def test_topics_are_names_between_commas_or_a_list() -> None:
    assert read(topics="a/#, b").topics == ("a/#", "b")
    assert read(topics='["a,b", "c"]').topics == ("a,b", "c")


def test_exclude_alone_means_everything_else() -> None:
    wanted = read(exclude="dlq/#").filter()
    assert wanted
    assert wanted.matches("a")
    assert not wanted.matches("dlq/a")
    assert read().filter() is None


def test_offsets_and_a_time_exclude_each_other() -> None:
    with pytest.raises(ArgumentError, match="startingOffsets and startingTime exclude each other"):
        read(startingOffsets="earliest", startingTime=NOW)


def test_a_journal_is_needed_and_only_one() -> None:
    with pytest.raises(ArgumentError, match="needs one journal"):
        ReadOptions.parse({})
    with pytest.raises(ArgumentError, match="not both"):
        read(url="http://h:1/rtl/journal/n")


def test_a_folder_is_made_absolute_and_an_address_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(path="app/.journal").journal == str(tmp_path / "app" / ".journal")
    assert read(path="http://h:1/rtl/journal/n").journal == "http://h:1/rtl/journal/n"
    assert read(path="file:///mnt/j").journal == read(path="file:/mnt/j").journal == "/mnt/j"
    with pytest.raises(ArgumentError, match="hdfs://n/j is not a folder of this machine: name its folder, or the http"):
        read(path="hdfs://n/j")


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert time_us("startingTime", NOW) == time_us("startingTime", NOW + "Z") == 1_795_273_200_000_000
    assert time_us("startingTime", NOW + "+02:00") == 1_795_273_200_000_000 - 7_200_000_000


def test_a_duration_is_that_long_ago() -> None:
    from datetime import UTC, datetime

    ago_us = epoch_us(datetime.now(UTC)) - time_us("startingTime", "2h")
    assert abs(ago_us - 7_200_000_000) < 5_000_000


def test_what_spark_adds_for_a_sink_is_no_mistake() -> None:
    given = {"checkpointLocation": "/tmp/c", "queryName": "q", "url": "http://h:1/rtl/journal/n", "retry": "5s"}
    assert WriteOptions.parse(CaseInsensitiveDict(given)).retry_s == 5
    with pytest.raises(ArgumentError, match='"topics" here. It has: cafile, path, retry, token, txnAppId'):
        WriteOptions.parse(CaseInsensitiveDict(given | {"topics": "a"}))


def test_options_travel_to_workers() -> None:
    options = read(topics="a/#", splitAt='{"n1": 3}')
    assert pickle.loads(pickle.dumps(options)) == options
