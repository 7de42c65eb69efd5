"""Continue a few prompts with the built-in model."""

from pagedweight_jax import SamplingParams, serve

with serve("demo", memory_budget="79MiB", max_model_len=256) as llm:
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=1)
    for output in llm.generate(["Once upon a time", "NAME\n git"], params):
        print(output.prompt + output.outputs[0].text)
        print(f"  served at {output.precision.mean_bits:.2f} bits on average\n")
    print(llm.memory_report())
