"""Trials at start: code is compared with plain torch before it serves. Each is a `Trial`.

| candidate                | reference              | in              | if it fails            |
|--------------------------|------------------------|-----------------|------------------------|
| model, paged attention   | `transformers`         | model_trial     | model not served       |
| attention backend        | `reference` of kernels | attention_trial | next backend           |
| rotation with KV writes  | plain torch            | attention_trial | no GPU decoder         |
| decoder of our own       | logits of the model    | decoders        | `transformers` serves  |
| packed matrices          | logits of the model    | decoders        | `transformers` serves  |
| draw, adjust, copy       | plain torch            | kernel_trials   | plain torch serves     |
| recorded steps and runs  | model not recorded     | runner          | steps are not recorded |

`float32_trial` has the cuts of models, their tokens and the error measures of logits.
"""
