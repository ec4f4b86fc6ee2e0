// SPDX-License-Identifier: Apache-2.0
// Instantiations of skinny_linear's kernel after a norm, K <= 768: 8, 16, 24, 32 rows x {plain, silu-mul}.
#include "linear/skinny_args.h"
#include "linear/skinny_epilogues.cuh"

namespace fv::skinny {

void run_normed(const Launch& launch, const Params& p, const Plain& epilogue) { run_skinny<true>(launch, p, epilogue); }
void run_normed(const Launch& launch, const Params& p, const SiluMul& epilogue) { run_skinny<true>(launch, p, epilogue); }

}  // namespace fv::skinny
