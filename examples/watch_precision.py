"""Send a burst that does not fit beside full-precision experts, and see what moved."""

from pagedweight_jax import SamplingParams, serve

with serve("demo", memory_budget="79MiB", max_model_len=256) as llm:
    print(f"before: {llm.mean_bits:.2f} bits, {llm.memory_report()}")
    params = SamplingParams(temperature=0.8, max_tokens=100, ignore_eos=True)
    outputs = llm.generate(["It was a dark and stormy night"] * 16, params)
    print(f"after the burst: {llm.mean_bits:.2f} bits")
    for event in llm.events():
        print(
            f"  plan {event.plan_id}: {event.reason}, {event.pages_down} pages down,"
            f" {event.pages_up} up, {event.freed_bytes} bytes freed, {event.outcome}"
        )
    print("preemptions:", sum(o.metrics.num_preemptions for o in outputs))
    llm.settle()
    print(f"at rest: {llm.mean_bits:.2f} bits; by layer and block:")
    print(llm.precision_map().mean(axis=1))
