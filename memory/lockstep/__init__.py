"""Lockstep: the passes of guidance take turns at each weight group, which comes once a step for all of them.

[Note: Passes in lockstep]
A stock pipeline makes one call of its transformer after the other: one for the prompt, one for the negative prompt.
Their weights are the same, so streamed weights come twice a step.

1. The sampling loop is run with made-up predictions (`once.recording`), which tells the passes of a step and the
   arguments in which they differ.
2. When the pipeline makes the first call of a step, the others are foreseen: they have those arguments, with the
   latents and the time of this one. All run at once, each in a thread of its own, and pass a baton on at each weight
   group (`engine.baton`). The waiting ones hold their residual stream only.
3. Their results are handed out when the pipeline makes the calls, if these have the same arguments bit for bit. So a
   wrong guess costs a pass, and never a bit. After one, passes run alone.
"""
