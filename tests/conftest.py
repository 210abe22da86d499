"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import itertools
import uuid

import pytest
from kafka_broker import broker

from spanloop.schemas.settings import Kafka

_numbers = itertools.count()


@pytest.fixture(scope="session")
def bootstrap_servers():
    """A Kafka broker for the whole run."""
    with broker() as address:
        yield address


@pytest.fixture
def kafka_settings(bootstrap_servers):
    """Settings with topics of this test alone."""
    return Kafka(prefix=f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}.", partitions=4)  # type: ignore[call-arg]
