"""The pod model predicts the times of the engine's scheduler, job by job."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from tandem_core.pod_model import Job, PodModel, SimulatedPod, Times, timeline
from tandem_core.sampling import SamplingParams
from tandem_core.step_cost import StepCost
from tandem_engine.batch import Batch
from tandem_engine.block_manager import BlockGroup, BlockManager
from tandem_engine.request import Request
from tandem_engine.scheduler import Scheduler, SchedulerConfig

MODEL = PodModel(
    prefill=StepCost(per_step=0.005, per_token=0.0004, per_pair=5e-8),
    decode=StepCost(per_step=0.008, per_token=0.0008, per_pair=4e-7),
    max_batch=4,
    chunk_size=512,
    enough_prompt_tokens=128,
)


@dataclass(frozen=True)
class Emitted:
    token_ids: tuple[int, ...] = (7,)
    path: tuple[int, ...] = (0,)


def step_seconds(batch: Batch) -> float:
    """A step with prompts in it reads the weights once, as the model has it."""
    texts = [s for s in batch.sequences if s.samples and s.request.output_token_ids]
    prompts = [s for s in batch.sequences if s not in texts]
    tokens = sum(s.num_new_tokens for s in prompts)
    pairs = sum(s.num_new_tokens * (s.start + s.num_new_tokens / 2) for s in prompts)
    seconds = MODEL.prefill.seconds(bool(prompts), tokens, pairs)
    return seconds + MODEL.decode.seconds(not prompts, len(texts), sum(s.start for s in texts))


def scheduled(jobs: Sequence[Job]) -> list[Times]:
    """What the engine's scheduler makes of them; each arrives when it is ready."""
    config = SchedulerConfig(
        max_model_len=65536,
        max_batch=MODEL.max_batch,
        max_tokens_per_step=MODEL.chunk_size,
        chunk_size=MODEL.chunk_size,
        enough_prompt_tokens=MODEL.enough_prompt_tokens,
    )
    scheduler = Scheduler(BlockManager([BlockGroup(4096)], 1), config)
    requests = [
        Request(
            f"{number}",
            [1000 * number + at for at in range(job.stop)],
            SamplingParams(max_tokens=round(job.num_tokens), ignore_eos=True),
            due=job.due,
        )
        for number, job in enumerate(jobs)
    ]
    now, coming = 0.0, sorted(zip(jobs, requests, strict=True), key=lambda both: both[0].ready_s)
    first: dict[str, float] = {}
    end: dict[str, float] = {}
    while coming or scheduler.has_work():
        if not scheduler.has_work():
            now = max(now, coming[0][0].ready_s)
        while coming and coming[0][0].ready_s <= now:
            scheduler.add(coming.pop(0)[1])
        batch = scheduler.schedule(now=now)
        assert batch is not None
        now += step_seconds(batch)
        for update in scheduler.update(batch, [Emitted() for s in batch.sequences if s.samples]):
            first.setdefault(update.request.request_id, now)
            if update.finished:
                end[update.request.request_id] = now
    return [Times(first[r.request_id], end[r.request_id]) for r in requests]


def random_jobs(seed: int, count: int) -> list[Job]:
    chance = random.Random(seed)
    jobs = []
    for _ in range(count):
        prompt, answer = chance.choice((20, 60, 300, 900)), chance.choice((1, 5, 40, 120))
        ready_s = chance.choice((0.0, 0.0, chance.random()))
        jobs.append(Job(chance.uniform(1, 9), 0, prompt, answer, prompt + answer // 2, ready_s=ready_s))
    return jobs


@pytest.mark.parametrize("seed", range(40))
def test_times_are_those_of_the_scheduler(seed: int) -> None:
    jobs = random_jobs(seed, 2 + seed % 9)
    predicted, real = timeline(MODEL, jobs), scheduled(jobs)
    longest_step_s = 0.005 + 512 * 0.0004 + 512 * 900 * 5e-8 + 4 * 0.0012
    for job, times in zip(jobs, real, strict=True):
        assert predicted[job].first_s == pytest.approx(times.first_s, rel=0.03, abs=longest_step_s)
        assert predicted[job].end_s == pytest.approx(times.end_s, rel=0.03, abs=longest_step_s)


def test_errors_do_not_add_up() -> None:
    """Over many jobs the mean error is a fraction of the time of a step."""
    errors = []
    for seed in range(40):
        jobs = random_jobs(seed, 8)
        predicted = timeline(MODEL, jobs)
        errors += [predicted[j].end_s - t.end_s for j, t in zip(jobs, scheduled(jobs), strict=True)]
    assert abs(sum(errors) / len(errors)) < 0.01
    assert sorted(map(abs, errors))[int(0.9 * len(errors))] < 0.05


def test_a_later_deadline_delays_no_earlier_one() -> None:
    early, late = Job(1, 0, 400, 50, 425), Job(2, 0, 400, 50, 425)
    alone, together = timeline(MODEL, [early])[early], timeline(MODEL, [late, early])
    assert together[early].first_s == alone.first_s
    assert together[late].first_s > together[early].first_s
    # They decode side by side, which costs each a little.
    assert alone.end_s < together[early].end_s < alone.end_s + timeline(MODEL, [late])[late].end_s


def test_more_jobs_than_places_wait_for_an_end() -> None:
    jobs = [Job(due, 0, 0, 100, 500) for due in range(5)]
    times = timeline(MODEL, jobs)
    ends = [times[job].end_s for job in jobs]
    assert ends[0] == ends[3] < times[jobs[4]].first_s < ends[4]


def test_a_job_of_several_places_holds_up_those_behind_it() -> None:
    singles = [Job(1, 0, 0, 10, 500), Job(2, 0, 0, 20, 500)]
    beams, last = Job(3, 0, 0, 100, 500, num_places=3), Job(4, 0, 0, 10, 500)
    times = timeline(MODEL, [last, beams, *singles])
    assert times[singles[0]].end_s < times[beams].first_s < times[singles[1]].end_s
    assert times[singles[1]].end_s < times[last].first_s < times[beams].end_s


def test_a_job_joins_when_its_kv_arrives() -> None:
    job = Job(1, 0, 0, 10, 500, ready_s=2.0)
    assert timeline(MODEL, [job])[job].first_s == pytest.approx(2.0 + MODEL.decode.seconds(1, 1, 500))


def test_drafts_shorten_answers() -> None:
    job = Job(1, 0, 0, 100, 500)
    gaining = replace(MODEL, tokens_per_step=(2.0, 1.5))
    assert timeline(gaining, [job])[job].end_s == pytest.approx(timeline(MODEL, [job])[job].end_s / 2)


def test_what_begins_beyond_the_horizon_stays_unknown() -> None:
    long, behind = Job(1, 0, 0, 10_000, 500, num_places=4), Job(2, 0, 100, 1, 100)
    times = timeline(MODEL, [long, behind], horizon_s=1.0)
    assert times[long].end_s == timeline(MODEL, [long])[long].end_s
    assert times[behind] == (math.inf, math.inf)


def test_sequences_that_exceed_the_batch_take_turns() -> None:
    assert MODEL.token_seconds(12, 500) == pytest.approx(3 * MODEL.token_seconds(4, 500))


def test_work_grows_in_proportion_to_the_jobs() -> None:
    """Counted, not timed: the steps that are simulated one by one."""

    class Counting(StepCost):
        calls = itertools.count()

        def seconds(self, num_steps: float, num_tokens: float, num_pairs: float) -> float:
            next(self.calls)
            return super().seconds(num_steps, num_tokens, num_pairs)

    def num_calls(count: int) -> int:
        before = next(Counting.calls)
        model = replace(MODEL, decode=Counting(0.008, 0.0008, 4e-7))
        timeline(model, [Job(due, 0, 400, 50, 425) for due in range(count)])
        return next(Counting.calls) - before

    assert num_calls(80) < 2.5 * num_calls(40)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_jobs_added_when_they_arrive_have_the_times_of_the_scheduler(seed: int) -> None:
    jobs = random_jobs(seed, 6)
    pod = SimulatedPod(MODEL)
    for job in sorted(jobs, key=lambda job: job.ready_s):
        pod.advance(job.ready_s)
        pod.add(job)
    pod.advance(1000.0)
    longest_step_s = 0.005 + 512 * 0.0004 + 512 * 900 * 5e-8 + 4 * 0.0012
    for job, times in zip(jobs, scheduled(jobs), strict=True):
        assert pod.times(job) == pytest.approx(times, rel=0.03, abs=longest_step_s)


def test_a_pod_that_is_interrupted_computes_what_it_computes_in_one_run() -> None:
    jobs = random_jobs(3, 8)
    pod = SimulatedPod(MODEL, jobs)
    for tenth in range(1, 1000):
        pod.advance(tenth / 10)
    for job, times in timeline(MODEL, jobs).items():
        assert pod.times(job) == pytest.approx(times)


def test_the_next_change_is_where_a_run_ends() -> None:
    pod, changes = SimulatedPod(MODEL, random_jobs(5, 6)), []
    while pod.has_jobs:
        changes.append(pod.change_s())
        pod.run()
        assert pod.now_s == changes[-1]
    assert changes == sorted(changes)
    assert pod.change_s() == math.inf


def test_the_step_in_progress_is_completed_before_a_job_joins() -> None:
    pod = SimulatedPod(MODEL, [Job(1, 0, 2000, 1, 2000)])
    steps_s = MODEL.prefill.prompt_seconds(0, 1024, 512)
    pod.advance(steps_s - 0.001)
    assert pod.now_s == pytest.approx(steps_s), "the second step is longer than the first one"


def test_jobs_that_exceed_the_kv_memory_wait_for_an_end() -> None:
    jobs = [Job(due, 0, 0, 100, 500, kv_tokens=600) for due in range(3)]
    times = timeline(replace(MODEL, kv_tokens=1200), jobs)
    assert times[jobs[0]].end_s == times[jobs[1]].end_s < times[jobs[2]].first_s
    alone = timeline(replace(MODEL, kv_tokens=500), jobs[:1])
    assert alone[jobs[0]].end_s < math.inf, "a job larger than the memory runs alone"


def test_a_step_that_decodes_and_computes_a_prompt_may_take_longer_than_both() -> None:
    answer, prompt = Job(1, 0, 0, 10, 500), Job(2, 0, 100, 1, 100)
    plain, slow = (timeline(replace(MODEL, mixed_steps=factor), [answer, prompt]) for factor in (1.0, 2.0))
    mixed_s = plain[prompt].end_s
    assert slow[prompt].end_s == pytest.approx(2 * mixed_s)
    assert slow[answer].end_s == pytest.approx(plain[answer].end_s + mixed_s)


def test_a_part_of_the_running_step_has_passed() -> None:
    job = Job(1, 0, 0, 10, 500)
    step_s = MODEL.decode.seconds(1, 1, 500)
    times = timeline(MODEL, [job], step_share=0.75)[job]
    assert times == pytest.approx((0.25 * step_s, 9.25 * step_s))


def test_a_job_that_arrives_joins_after_the_running_step() -> None:
    prompt, coming = Job(2, 0, 1024, 1, 1024), Job(1, 0, 512, 1, 512, ready_s=0.0)
    times = timeline(MODEL, [prompt, coming], step_share=0.5)
    first_s, second_s = (MODEL.prefill.prompt_seconds(start, start + 512, 512) for start in (0, 512))
    assert times[coming].first_s == pytest.approx(0.5 * first_s + first_s)
    assert times[prompt].first_s == pytest.approx(0.5 * first_s + first_s + second_s)


def test_an_earlier_deadline_takes_a_place_of_a_full_batch() -> None:
    batch = [Job(due, 0, 0, 100, 500) for due in (2, 3, 4, 5)]
    coming = Job(1, 0, 0, 10, 500, ready_s=0.0)
    before, times = (timeline(MODEL, jobs, step_share=0.5) for jobs in (batch, [*batch, coming]))
    step_s = MODEL.decode.seconds(1, 4, 4 * 500)
    assert times[coming] == pytest.approx((1.5 * step_s, 10.5 * step_s))
    assert all(times[job] == before[job] for job in batch[:3])
    assert times[batch[3]].first_s == before[batch[3]].first_s, "it was in the running step"
    assert times[batch[3]].end_s > before[batch[3]].end_s + 5 * step_s


def test_each_place_of_a_job_is_a_sequence_of_the_batch() -> None:
    beams, singles = Job(1, 0, 0, 10, 500, num_places=3), [Job(due, 0, 0, 10, 500) for due in range(3)]
    times = timeline(MODEL, singles)
    assert timeline(MODEL, [beams])[beams] == pytest.approx(times[singles[0]])
    longer = Job(2, 0, 0, 100, 500)
    left_s = timeline(MODEL, [beams, longer])[longer].end_s - 10 * MODEL.decode_seconds(1, 4, 500)
    assert left_s == pytest.approx(90 * MODEL.decode_seconds(1, 1, 500)), "they leave together"
    many = Job(1, 0, 0, 10, 500, num_places=2 * MODEL.max_batch)
    assert timeline(MODEL, [many])[many].end_s < math.inf, "one that exceeds the batch runs alone"
