"""Errors of a real S3 cost an offload retries, and never a record or an unknown object."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.pipeline.offload_rig import check_all_is_remote_once, offload_rig
from tests.support.servers.faulty_s3 import Answer, FaultyS3
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TopicWith
from tests.support.servers.versitygw import VersityGateway

BUCKET = "offload-in-trouble"
ANSWERS = [
    *(Answer.SLOW_DOWN, Answer.SLOW_DOWN),
    *(Answer.PASSED, Answer.PASSED, Answer.STORED_BUT_ERROR, Answer.PASSED, Answer.CONFLICT),
    *(Answer.PASSED, Answer.PRECONDITION),
    *(Answer.PASSED, Answer.PASSED, Answer.SLOW),
    *(Answer.PASSED, Answer.INTERNAL_ERROR, Answer.INTERNAL_ERROR),
]


@pytest.mark.integration
def test_after_faults_of_the_store_every_record_is_stored_once(
    kafka_of_three: KafkaCluster, s3: VersityGateway, topic_name: str, topic_with: TopicWith, tmp_path: Path
) -> None:
    topic_with(200)
    asyncio.run(s3.create_bucket(BUCKET))
    with FaultyS3(s3.endpoint_url) as faulty:
        settings = {**s3.settings(BUCKET), "endpoint.url": faulty.url, "timeout.ms": "20000"}
        section = ["[storage]", 'implementation = "s3"', *(f'{key} = "{value}"' for key, value in settings.items())]
        rig = offload_rig(kafka_of_three, tmp_path, topic_name, "\n".join(section))
        rig = replace(rig, stored=s3.folder / "data" / BUCKET)
        faulty.answers.extend(ANSWERS)
        report = rig.offload()
        assert report.troubles == []
        assert not faulty.answers
        assert report.waves > 1, "no fault cost more than a retry of its request"
        assert report.partitions[0].segments == 4
        check_all_is_remote_once(rig)
