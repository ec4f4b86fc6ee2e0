// SPDX-License-Identifier: Apache-2.0
// skinny_linear over long K on CUDA, kinds PLAIN and ADD (linear/wide_kernel.cuh). Instantiations: 8 and 16 rows of each.
#include "linear/skinny_args.h"
#include "linear/skinny_epilogues.cuh"

namespace fv::skinny {

void run_wide_plain(const Launch& launch, const Params& p, const Plain& to) { run_wide(launch, p, to); }
void run_wide_add(const Launch& launch, const Params& p, const Plain& to) { run_wide(launch, p, Add{to}); }

}  // namespace fv::skinny
