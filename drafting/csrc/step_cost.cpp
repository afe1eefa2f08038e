// The calls of tandem_drafting.step_cost.

#include "step_cost.h"

extern "C" {

StepCost* tandem_step_cost_new(double row_cost) { return new StepCost(row_cost); }
void tandem_step_cost_free(StepCost* cost) { delete cost; }
void tandem_step_cost_observe(StepCost* cost, const StepCost::Step* steps, int32_t count) {
  cost->observe(steps, count);
}
void tandem_step_cost_curve(const StepCost* cost, int32_t num_sequences, int64_t context, int32_t count,
                            double* seconds) {
  cost->curve(num_sequences, context, count, seconds);
}
}
