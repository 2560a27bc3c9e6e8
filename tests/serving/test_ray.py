"""Ray Serve over the same application: two replicas give the answers of one."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from tests.serving.conftest import free_port

from slipstream import generate
from slipstream.assets import PROMPTS
from slipstream.data.rows import read_rows

ray = pytest.importorskip("ray", reason='needs Ray Serve: pip install "slipstream[serve,ray]"')


@pytest.mark.exhaustive
def test_two_replicas_give_the_answers_of_one():
    from ray import serve

    from slipstream.serving.ray_app import build

    texts = [row.prompt for row in read_rows(PROMPTS / "data_to_text", "test", False)[:12]]
    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        given = {"replicas": "2", "server.adaptive": "false", "threads": "1"}
        serve.run(build(given))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)

        def ask(text: str, **more):
            messages = [{"role": "user", "content": text}]
            return client.chat.completions.create(
                model="slipstream", messages=messages, max_tokens=24, **more
            )

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(ask, texts))
        for text, own in zip(texts, found, strict=True):
            expected = generate(text, max_new_tokens=24).text
            assert own.choices[0].message.content == expected
        streamed = ask(texts[0], stream=True)
        pieces = [each.choices[0].delta.content or "" for each in streamed]
        assert "".join(pieces) == found[0].choices[0].message.content and len(pieces) > 3
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            ask(texts[0], extra_body={"max_tokens": 10**9})
        details = serve.status().applications["default"].deployments["slipstream"]
        assert details.replica_states == {"RUNNING": 2}
    finally:
        serve.shutdown()
        ray.shutdown()
