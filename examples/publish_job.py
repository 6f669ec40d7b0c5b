"""Submit a job straight to the broker, with aio-pika and nothing of springtide.

    python examples/publish_job.py amqp://user:password@host:5672/vhost [JOB_ID]

Prints the coordinator's answer as JSON and exits with 0 (accepted), 1 (refused) or 2 (no answer).
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from typing import Any
from urllib.parse import urlsplit

import aio_pika
from aio_pika.exceptions import AMQPException, PublishError

LIMIT_SECONDS = 15.0


async def submit(url: str, job: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's answer: {"job_id", "accepted"} and, if refused, why."""
    async with asyncio.timeout(LIMIT_SECONDS), await aio_pika.connect(url) as connection:
        # Confirmed by the broker; returned to us if no coordinator has ever made its queue.
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        answers = await channel.declare_queue(exclusive=True, auto_delete=True)
        message = aio_pika.Message(
            json.dumps(job).encode(),
            type="job.submit.v1",
            content_type="application/json",
            delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
            message_id=str(uuid.uuid4()),
            correlation_id=job["id"],
            reply_to=answers.name,
            user_id=urlsplit(url).username,  # checked by the broker; it is the job's tenant
        )
        exchange = await channel.get_exchange("springtide")
        await exchange.publish(message, routing_key="job.submit.v1", mandatory=True)
        while True:
            answer = await answers.get(no_ack=True, fail=False)
            if answer is not None and answer.correlation_id == job["id"]:
                return dict(json.loads(answer.body))
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    job_id = sys.argv[2] if len(sys.argv) > 2 else str(uuid.uuid4())
    command = ["sh", "-c", 'echo "task $SPRINGTIDE_TASK_INDEX"']
    job = {"id": job_id, "name": "hello", "command": command, "array": {"size": 3}}
    try:
        reply = asyncio.run(submit(sys.argv[1], job))
    except (PublishError, TimeoutError, AMQPException, OSError) as error:
        cause = "no coordinator" if isinstance(error, PublishError) else type(error).__name__
        print(f"no answer ({cause}); publishing {job_id} again is harmless", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(reply))
    sys.exit(0 if reply["accepted"] else 1)
