// SPDX-License-Identifier: Apache-2.0
// Every sentence with which the library refuses a call: "op: argument given: <sentence>".
#pragma once

#include <array>

namespace winnow::refusal {

// Tensors.
inline constexpr char absent[] = "must be given";
inline constexpr char rank[] = "must have {} dimensions, [{}]";
inline constexpr char rank_of_x[] = "must have 2 or 3 dimensions";
inline constexpr char dtype[] = "dtype must be {}";
inline constexpr char device_kind[] = "device must be cpu or cuda";
inline constexpr char device[] = "must be on {}, as {}";
inline constexpr char negative_shape[] = "no dimension may be negative";
inline constexpr char too_large[] = "extends past what 64-bit offsets can address";
inline constexpr char null_data[] = "data must not be null";
inline constexpr char misaligned[] = "data must be aligned to {} bytes";
inline constexpr char inner_stride[] = "the last stride must be 1";
inline constexpr char negative_stride[] = "strides must not be negative";
inline constexpr char overlap[] = "elements of an output must not overlap";
inline constexpr char shared_memory[] =
    "outputs and workspace must not share memory with another argument";
inline constexpr char dim_differs[] = "{} must be {}, as in {}";
inline constexpr char dim_at_least[] = "{} must be at least {}";
inline constexpr char dim_at_most[] = "{} must be at most {}";
inline constexpr char dim_multiple[] = "{} must be a multiple of {}";

// Numbers and words.
inline constexpr char at_least[] = "must be at least {}";
inline constexpr char at_most[] = "must be at most {}";
inline constexpr char at_least_as[] = "must be at least {}, as {}";
inline constexpr char at_most_as[] = "must be at most {}, as {}";
inline constexpr char at_least_or_fill[] = "must be at least {}, or {} behind the last length";
inline constexpr char same_as[] = "must be {}, as {}";
inline constexpr char multiple_of_as[] = "must be a multiple of {}, as {}";
inline constexpr char one_of[] = "must be {}";
inline constexpr char not_finite[] = "must be finite";
inline constexpr char no_default_scale[] =
    "must be given: there is no default where v_dim and qk_dim differ";
inline constexpr char scale_absent[] = "must be given, as to sparse_attention";
inline constexpr char dlpack_dtype[] =
    "dtype must be f32, bf16, f16, f64, f8_e4m3 or i32, one lane";
inline constexpr char dlpack_device[] =
    "device must be DLPack's CPU (1), CUDA (2) or pinned CUDA memory (3)";
inline constexpr char dlpack_rank[] = "must have 0 to 4 dimensions";
inline constexpr char element_count[] = "must have {} elements, as the memory does";

// One argument against another.
inline constexpr char needs_fp8[] = "must be absent unless q is f8_e4m3";
inline constexpr char fp8_needs_scale[] = "must be given where q is f8_e4m3";
inline constexpr char replay_needs_scores[] = "must be given with replay";
inline constexpr char needs_sink[] = "must be absent without sink";
inline constexpr char needs_pools[] = "must be absent where ratio is 0";
inline constexpr char must_start_at_zero[] = "must be 0";
inline constexpr char narrow_list[] = "topk must be at least {}, the longest list";
inline constexpr char workspace_small[] = "must be at least {} bytes, as workspace_bytes says";
inline constexpr char workspace_null[] = "must be given where workspace_bytes is not 0";

// Legal, but not here: the sentences of why_not.
inline constexpr char no_f64[] = "does not take f64: it computes in fp32";
inline constexpr char not_built[] = "is not in this build";
inline constexpr char no_such_op[] = "does not have this operator";
inline constexpr char device_out_of_reach[] = "cannot reach tensors on {}";
inline constexpr char over_limit[] =
    "needs a workspace_limit of at least {} bytes for this call, the limit is {}";

// The same of single kernels and of the cuda backend. Which of them a machine can give depends on
// its CPU and GPU.
inline constexpr char needs_avx512_bf16[] = "needs a CPU with AVX512-BF16 instructions";
inline constexpr char no_cuda_device[] = "finds no CUDA device";
inline constexpr char no_driver[] = "finds no NVIDIA driver, or one that is too old for CUDA {}.{}";
inline constexpr char cannot_start[] = "cannot start: {}";
inline constexpr char no_such_device[] = "has no device {}: there are {}";
inline constexpr char needs_capability[] = "needs compute capability {}.{}, {} has {}.{}";
inline constexpr char too_little_shared[] = "has too little shared memory on this device";
inline constexpr char takes_dtypes[] = "takes {}";
inline constexpr char takes_widths[] = "takes qk_dim/v_dim {}";
inline constexpr char takes_qk_dims[] = "takes qk_dim {}";
inline constexpr char takes_dim_up_to[] = "takes {} up to {}";
inline constexpr char takes_dim[] = "takes {} {}";
inline constexpr char takes_dim_multiple[] = "takes {} in multiples of {}";
inline constexpr char takes_aligned_rows[] = "takes rows of {} that begin at 16-byte boundaries";
inline constexpr char takes_dense_rows[] =
    "takes rows of {} that begin at 16-byte boundaries, one behind another";
inline constexpr char takes_some_rows[] = "takes at least one row of {}";
inline constexpr char takes_fewer_rows[] = "takes fewer rows";
inline constexpr char takes_positive_scale[] = "takes a positive scale";
inline constexpr char takes_whole_rows[] = "takes all slots of a row at a time";
inline constexpr char no_replay[] = "does not replay";

// Of communicators: parts that this build or this machine does not have.
inline constexpr char part_not_built[] = "{}: {} is not in this build";
inline constexpr char no_library[] =
    "nccl_communicator: {} was looked for among the libraries of this process, in LD_LIBRARY_PATH "
    "and "
    "in the loader's folders: {}";
inline constexpr char no_function[] = "nccl_communicator: {} has no {}";

// What explain says of kernels beside the one that was asked for.
inline constexpr char other_kernel[] = "is not the one that was asked for";

// Running out of memory.
inline constexpr char no_workspace[] = "cannot allocate a workspace of {} bytes";
inline constexpr char no_host_memory[] = "out of host memory";

/// Those that a call can get on every machine, whatever memory it has.
inline constexpr std::array<const char*, 48> all = {absent,
                                                    rank,
                                                    rank_of_x,
                                                    dtype,
                                                    device_kind,
                                                    device,
                                                    negative_shape,
                                                    too_large,
                                                    null_data,
                                                    misaligned,
                                                    inner_stride,
                                                    negative_stride,
                                                    overlap,
                                                    shared_memory,
                                                    dim_differs,
                                                    dim_at_least,
                                                    dim_at_most,
                                                    dim_multiple,
                                                    at_least,
                                                    at_most,
                                                    at_least_as,
                                                    at_most_as,
                                                    at_least_or_fill,
                                                    same_as,
                                                    multiple_of_as,
                                                    one_of,
                                                    not_finite,
                                                    no_default_scale,
                                                    scale_absent,
                                                    dlpack_dtype,
                                                    dlpack_device,
                                                    dlpack_rank,
                                                    element_count,
                                                    needs_fp8,
                                                    fp8_needs_scale,
                                                    replay_needs_scores,
                                                    needs_sink,
                                                    needs_pools,
                                                    must_start_at_zero,
                                                    narrow_list,
                                                    workspace_small,
                                                    workspace_null,
                                                    no_f64,
                                                    not_built,
                                                    no_such_op,
                                                    device_out_of_reach,
                                                    over_limit,
                                                    takes_dtypes};

}  // namespace winnow::refusal
