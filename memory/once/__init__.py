"""Modules that see no latents are computed once for a whole schedule; the loop takes their results from tables.

[Note: Modules computed once]
A quarter of the weights of many transformers sees no latents: modulation sees the timestep, keys and values of cross
attention see text. What they give for each step is known before the first one.

1. A dry run follows what each operator reads (`planning.taint`). `choice` picks the modules whose results take fewer
   bytes than their weights, with all that these need.
2. `recording` runs the sampling loop with made-up predictions, and notes the arguments of each call that do not change
   with the latents.
3. `rehearsal` runs the module's own code for each of these calls, with latents that have shapes only (`shaped`). Each
   chosen module is brought to the device once, and computes the results of all calls, in stock shapes.
4. In the loop `tables` answers for the chosen modules. Each call's arguments are compared with the noted ones, bit for
   bit; a call that is not found runs with all its weights. So a wrong guess costs time, and never a bit.
"""
