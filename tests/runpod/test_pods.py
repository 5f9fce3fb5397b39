from __future__ import annotations


async def test_jobs_on_pods(pods) -> None:
    async with pods() as room:
        record = await room.do("echo", {"n": 1})
        assert (record.state, record.result["echo"]) == ("done", 1)
    assert room.account.live_pods() == []
