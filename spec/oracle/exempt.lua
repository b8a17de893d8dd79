-- What the oracle does not check, by name and with the reason. An entry that is no longer needed fails as well.
return {
  -- Ops with float inputs and no gradient: nothing there to differentiate, or never recorded.
  no_gradient = {},
  -- Inputs of ops that have a gradient, which are not served: OP.PARAM.
  no_input_gradient = {},
  -- Results that are no function to differentiate, by op.
  no_output_gradient = {},
  -- Gradients that have none themselves.
  no_second_gradient = {},
  -- Only "all B" is legal, or the rule is not written.
  no_sbp = {},
  -- Results that are not determined by the inputs.
  undefined = {},
  -- No run without elements.
  no_empty = {},
  -- No 16-bit floats.
  no_half = {},
  -- float32 and float64 give other results by nature.
  other_in_float32 = {},
}
