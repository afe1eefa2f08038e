"""What `tandem up` says about SLO classes."""

from dataclasses import replace

from tandem_cli import reach
from tandem_cli.reach import Reach
from tandem_cli.supervisor import ProcessSpec
from tandem_core.slo import SLO_CLASSES
from tandem_core.step_cost import StepCost
from tandem_gateway.pod_load import PodLoad

#: A millisecond per prompt token, twice of what it takes without load; ten per output token.
LOAD = PodLoad(
    prefill_cost=StepCost(per_token=0.002, unloaded=0.5), decode_cost=StepCost(per_token=0.01), chunk_size=512
)


def test_the_longest_prompt_of_a_class_is_found():
    alone = Reach(LOAD, LOAD)
    assert alone.longest_prompt(SLO_CLASSES["chat"], 8000) == 1000
    assert alone.longest_prompt(SLO_CLASSES["interactive"], 8000) == 2500
    assert alone.longest_prompt(SLO_CLASSES["interactive"], 2000) == 2000
    slow = replace(LOAD, decode_cost=StepCost(per_token=0.2))
    assert Reach(LOAD, slow).longest_prompt(SLO_CLASSES["chat"], 8000) == 0


def test_classes_that_hold_for_every_prompt_are_not_mentioned():
    sentences = reach._sentences(Reach(LOAD, LOAD), 8000)
    assert sentences[0] == (
        "Without load, about: 0.26 s to the first token of a 256-token prompt, 4.1 s to the first token of a "
        "4,096-token prompt; 10 ms per token."
    )
    assert "interactive can be kept for prompts of up to 2,500 tokens" in sentences[1]
    assert "chat can be kept for prompts of up to 1,000 tokens" in sentences[2]
    assert len(sentences) == 3
    assert len(reach._sentences(Reach(LOAD, LOAD), 900)) == 1


async def test_pods_that_do_not_answer_are_not_spoken_of():
    def spec(role: str) -> ProcessSpec:
        return ProcessSpec(role, f"{role}-0", ["true"], {}, "127.0.0.1:1")

    assert await reach.lines([]) == []
    assert await reach.lines([spec("decode"), spec("prefill")]) == []
