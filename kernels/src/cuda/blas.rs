//! Matrix products on CUDA by cuBLASLt.
//!
//! f32 products are computed in f32, those of linear layers in TF32 where [`allow_tf32`] says so; bf16
//! products accumulate in f32. Equal inputs give equal bits.
//!
//! cubecl keeps its stream private, so products run on a stream of their own between two events:
//! it waits for all work that was issued to the context before, and what is issued to the context
//! later waits for it. Buffers may therefore be reused as soon as [`matmul`] returns.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys as lt_sys;
use cudarc::driver::sys as cu;

use super::{CudaTensor, empty};

/// Bytes of scratch memory, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Plans kept. Decoding makes new ones at every token, so there is no end to them.
const MOST_PLANS: usize = 4096;

/// What cuBLASLt assumes of an address unless told otherwise.
const BEST_ALIGNMENT: u64 = 256;

/// Whether linear layers may round f32 factors to TF32.
static TF32: AtomicBool = AtomicBool::new(false);

/// Lets the linear layers of this process multiply f32 factors as TF32, with 10 bits of mantissa
/// instead of 23, on tensor cores. Off at first. Other products, [`matmul`]'s, stay exact.
pub fn allow_tf32(allow: bool) {
    TF32.store(allow, Ordering::Relaxed);
}

/// a · b for each matrix of a batch.
///
/// - `a`: `[…, m, k]`, of any strides
/// - `b`: `[…, k, n]`, with the same leading sizes
///
/// Returns `[…, m, n]`, contiguous, of the inputs' type: f32, bf16 or f64.
///
/// # Panics
/// When the sizes or types do not fit, or cuBLASLt fails.
pub fn matmul(a: CudaTensor, b: CudaTensor) -> CudaTensor {
    let dtype = a.dtype;
    run(a, b, dtype, Epilogue::None, false)
}

/// As [`matmul`], with a result in f32 of inputs in f32 or bf16.
pub fn matmul_f32(a: CudaTensor, b: CudaTensor) -> CudaTensor {
    run(a, b, DType::F32, Epilogue::None, false)
}

/// What is done to a product before it is written.
pub enum Epilogue {
    /// Nothing.
    None,
    /// A tensor of the product's shape is added in f32, though some of cuBLASLt's algorithms for small
    /// bf16 products round the product first. Its buffer takes the result where nobody else owns it.
    Add(CudaTensor),
    /// A vector of n elements is added to each row.
    Bias(CudaTensor),
    /// GELU in its tanh form; the product itself is written to this contiguous tensor too.
    Gelu(CudaTensor),
}

/// A linear layer's a · b for each matrix of a batch, as [`matmul`], then the epilogue; the result is
/// of type `dtype`: the inputs' own, or f32 of bf16 inputs.
///
/// # Panics
/// When the sizes or types do not fit, or cuBLASLt fails.
pub fn product(a: CudaTensor, b: CudaTensor, dtype: DType, epilogue: Epilogue) -> CudaTensor {
    run(a, b, dtype, epilogue, TF32.load(Ordering::Relaxed))
}

fn run(a: CudaTensor, b: CudaTensor, dtype: DType, epilogue: Epilogue, tf32: bool) -> CudaTensor {
    let mut shape = a.meta.shape().to_vec();
    let rank = shape.len();
    let (sa, sb) = (a.meta.shape().to_vec(), b.meta.shape().to_vec());
    assert!(rank >= 2 && sb.len() == rank, "product of {sa:?} and {sb:?}");
    assert_eq!(sa[..rank - 2], sb[..rank - 2], "batches of the product of {sa:?} and {sb:?}");
    assert_eq!(sa[rank - 1], sb[rank - 2], "inner size of the product of {sa:?} and {sb:?}");
    assert_eq!(a.dtype, b.dtype, "types of the factors");
    assert_eq!(a.device, b.device, "devices of the factors");
    shape[rank - 1] = sb[rank - 1];
    let index = a.device.index;
    let (a, b) = (Factor::new(a), Factor::new(b));
    let (out, extra) = match epilogue {
        Epilogue::None => (empty(&a.tensor, &shape, dtype), Extra::None),
        Epilogue::Add(term) => {
            assert_eq!(
                (term.meta.shape().to_vec(), term.dtype),
                (shape.clone(), dtype),
                "the term"
            );
            let term = into_contiguous(term);
            let own = term.can_mut();
            let out = if own { term.clone() } else { empty(&a.tensor, &shape, dtype) };
            (out, Extra::Add(term))
        }
        Epilogue::Bias(bias) => {
            assert_eq!(bias.meta.shape().to_vec(), shape[rank - 1..], "the bias");
            let bias = into_contiguous(cast(bias, dtype));
            (empty(&a.tensor, &shape, dtype), Extra::Vector(bias))
        }
        Epilogue::Gelu(aux) => (empty(&a.tensor, &shape, dtype), Extra::Gelu(aux)),
    };
    if let Extra::Gelu(aux) = &extra {
        assert_eq!((aux.meta.shape().to_vec(), aux.dtype), (shape, dtype), "GELU's argument");
        assert!(aux.is_contiguous(), "GELU's argument has gaps");
    }
    // A product that failed has changed nothing that the next one uses.
    let mut all = BLAS.lock().unwrap_or_else(PoisonError::into_inner);
    let blas = all.entry(index).or_insert_with(|| Blas::new(index as i32));
    blas.run(&a, &b, &Factor::new(out.clone()), &extra, tf32);
    out
}

/// An [`Epilogue`] with its tensor in place.
enum Extra {
    None,
    Add(CudaTensor),
    Vector(CudaTensor),
    Gelu(CudaTensor),
}

impl Extra {
    fn tensor(&self) -> Option<&CudaTensor> {
        match self {
            Extra::None => None,
            Extra::Add(x) | Extra::Vector(x) | Extra::Gelu(x) => Some(x),
        }
    }

    /// The epilogue as cuBLASLt names it; none for a sum, which is a factor's.
    fn kind(&self) -> Option<lt_sys::cublasLtEpilogue_t> {
        use lt_sys::cublasLtEpilogue_t as Kind;
        match self {
            Extra::None | Extra::Add(_) => None,
            Extra::Vector(_) => Some(Kind::CUBLASLT_EPILOGUE_BIAS),
            Extra::Gelu(_) => Some(Kind::CUBLASLT_EPILOGUE_GELU_AUX),
        }
    }
}

/// How a batch of matrices lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    rows: u64,
    columns: u64,
    /// Elements from one row to the next or, where `by_columns`, from one column to the next.
    leading: i64,
    /// Whether a column, not a row, is contiguous.
    by_columns: bool,
    batch: i32,
    batch_stride: i64,
}

impl Layout {
    /// The layout of a tensor, or `None` where no single one describes it.
    fn of(shape: &[usize], strides: &[usize]) -> Option<Self> {
        let outer = shape.len() - 2;
        let (rows, columns) = (shape[outer], shape[outer + 1]);
        let (row, column) = (strides[outer], strides[outer + 1]);
        let (leading, by_columns) =
            if (column == 1 || columns == 1) && (row >= columns || rows == 1) {
                (if rows == 1 { columns } else { row }, false)
            } else if (row == 1 || rows == 1) && (column >= rows || columns == 1) {
                (if columns == 1 { rows } else { column }, true)
            } else {
                return None;
            };
        let mut batch = 1;
        let mut batch_stride = 0;
        for (&size, &stride) in shape[..outer].iter().zip(&strides[..outer]).rev() {
            match size {
                1 => {}
                _ if batch == 1 => batch_stride = stride,
                _ if stride != batch_stride * batch => return None,
                _ => {}
            }
            batch *= size;
        }
        Some(Layout {
            rows: rows as u64,
            columns: columns as u64,
            leading: leading as i64,
            by_columns,
            batch: i32::try_from(batch).ok()?,
            batch_stride: batch_stride as i64,
        })
    }
}

/// A tensor that cuBLASLt can read or write as it lies.
struct Factor {
    tensor: CudaTensor,
    layout: Layout,
}

impl Factor {
    fn new(tensor: CudaTensor) -> Self {
        let layout = |x: &CudaTensor| Layout::of(x.meta.shape(), x.meta.strides());
        if let Some(layout) = layout(&tensor) {
            return Factor { tensor, layout };
        }
        let tensor = into_contiguous(tensor);
        let layout = layout(&tensor).expect("contiguous matrices have a layout");
        Factor { tensor, layout }
    }
}

/// What a plan depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// Of a, b and the product.
    layouts: [Layout; 3],
    /// Of their addresses and that of the epilogue's tensor, as powers of two.
    alignments: [u32; 4],
    /// Of the factors and of the product.
    types: [DType; 2],
    /// Whether f32 factors are rounded to TF32.
    tf32: bool,
    epilogue: Option<lt_sys::cublasLtEpilogue_t>,
}

/// One product, ready to run: cuBLASLt's descriptions of it and the algorithm it chose.
struct Plan {
    description: lt_sys::cublasLtMatmulDesc_t,
    layouts: [lt_sys::cublasLtMatrixLayout_t; 3],
    algorithm: lt_sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt on one device.
struct Blas {
    context: cu::CUcontext,
    handle: lt_sys::cublasLtHandle_t,
    stream: cu::CUstream,
    before: cu::CUevent,
    after: cu::CUevent,
    workspace: cu::CUdeviceptr,
    plans: HashMap<Key, Plan>,
}

/// One entry for each device used; they live as long as the process.
static BLAS: Mutex<BTreeMap<usize, Blas>> = Mutex::new(BTreeMap::new());

// SAFETY: the pointers are CUDA's and cuBLASLt's own objects, usable from any thread; the mutex
// around every `Blas` keeps their use exclusive.
unsafe impl Send for Blas {}

fn check(call: &str, result: cu::CUresult) {
    assert_eq!(result, cu::CUresult::CUDA_SUCCESS, "{call}");
}

impl Blas {
    fn new(index: i32) -> Self {
        let (mut device, mut context, mut stream) = (0, null_mut(), null_mut());
        let (mut before, mut after, mut workspace) = (null_mut(), null_mut(), 0);
        // SAFETY: every pointer given is to a local of the type asked for; the context, the
        // device's primary one which cubecl uses too, is never released.
        unsafe {
            check("cuInit", cu::cuInit(0));
            check("cuDeviceGet", cu::cuDeviceGet(&mut device, index));
            check("cuDevicePrimaryCtxRetain", cu::cuDevicePrimaryCtxRetain(&mut context, device));
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(context));
            let flags = cu::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            check("cuStreamCreate", cu::cuStreamCreate(&mut stream, flags));
            let flags = cu::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            check("cuEventCreate", cu::cuEventCreate(&mut before, flags));
            check("cuEventCreate", cu::cuEventCreate(&mut after, flags));
            check("cuMemAlloc", cu::cuMemAlloc_v2(&mut workspace, WORKSPACE));
        }
        let handle = lt::create_handle().expect("cuBLASLt starts");
        Blas { context, handle, stream, before, after, workspace, plans: HashMap::new() }
    }

    fn run(&mut self, a: &Factor, b: &Factor, out: &Factor, extra: &Extra, tf32: bool) {
        let factors = [a, b, out];
        // Blocks until the work that writes these buffers is issued. Held until the end: the
        // buffers stay reserved.
        let resources = factors.map(|x| {
            let resource = x.tensor.client.get_resource(x.tensor.handle.clone());
            resource.expect("the buffer exists")
        });
        let at = [0, 1, 2].map(|i| resources[i].resource().ptr);
        let extra_resource = extra.tensor().map(|x| {
            let resource = x.client.get_resource(x.handle.clone());
            resource.expect("the buffer exists")
        });
        let extra_at = extra_resource.as_ref().map_or(0, |x| x.resource().ptr);
        // Of every matrix of the batch, not of the first alone.
        let align = |address: u64| address.trailing_zeros().min(BEST_ALIGNMENT.ilog2());
        let [of_a, of_b, of_out] = [0, 1, 2].map(|i| {
            let Factor { tensor, layout } = factors[i];
            align(at[i] | (layout.batch_stride as u64 * tensor.dtype.size() as u64))
        });
        let key = Key {
            layouts: factors.map(|x| x.layout),
            alignments: [of_a, of_b, of_out, align(extra_at)],
            types: [a.tensor.dtype, out.tensor.dtype],
            tf32: tf32 && a.tensor.dtype == DType::F32,
            epilogue: extra.kind(),
        };
        let handle = self.handle;
        if self.plans.len() >= MOST_PLANS {
            self.plans.clear();
        }
        let plan = self.plans.entry(key.clone()).or_insert_with(|| Plan::new(handle, &key));
        plan.set_extra(extra, extra_at);
        let scale = Scale::new(a.tensor.dtype);
        let adds = matches!(extra, Extra::Add(_));
        let (factor, term) = if adds { (scale.one(), extra_at) } else { (scale.zero(), at[2]) };
        // SAFETY: addresses and layouts describe buffers that `resources` keeps alive until the
        // last wait is issued; the workspace is used on this one stream only.
        unsafe {
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(self.context));
            check("cuCtxRecordEvent", cu::cuCtxRecordEvent(self.context, self.before));
            check("cuStreamWaitEvent", cu::cuStreamWaitEvent(self.stream, self.before, 0));
            // Row by row, the product is that of the transposes in cuBLASLt's column order.
            lt::matmul(
                self.handle,
                plan.description,
                scale.one(),
                factor,
                at[1] as *const c_void,
                plan.layouts[1],
                at[0] as *const c_void,
                plan.layouts[0],
                term as *const c_void,
                plan.layouts[2],
                at[2] as *mut c_void,
                plan.layouts[2],
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                self.stream.cast(),
            )
            .unwrap_or_else(|error| panic!("cublasLtMatmul of {key:?}: {error:?}"));
            check("cuEventRecord", cu::cuEventRecord(self.after, self.stream));
            check("cuCtxWaitEvent", cu::cuCtxWaitEvent(self.context, self.after));
        }
    }
}

/// The factors 1 and 0 in the type that a product is scaled in.
enum Scale {
    F32([f32; 2]),
    F64([f64; 2]),
}

impl Scale {
    fn new(dtype: DType) -> Self {
        if dtype == DType::F64 { Scale::F64([1.0, 0.0]) } else { Scale::F32([1.0, 0.0]) }
    }

    fn at(&self, i: usize) -> *const c_void {
        match self {
            Scale::F32(x) => (&raw const x[i]).cast(),
            Scale::F64(x) => (&raw const x[i]).cast(),
        }
    }

    fn one(&self) -> *const c_void {
        self.at(0)
    }

    fn zero(&self) -> *const c_void {
        self.at(1)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Plan::new` and destroyed once. cuBLASLt reads them only while a product
        // is issued.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.description);
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Plan {
    fn new(handle: lt_sys::cublasLtHandle_t, key: &Key) -> Self {
        let Key { layouts, alignments, types: [factors, result], tf32, epilogue } = key;
        let (_, mut compute, scale) = types(*factors);
        if *tf32 {
            compute = lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32;
        }
        let [a, b, _] = layouts;
        let description = lt::create_matmul_desc(compute, scale).expect("a product's description");
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        // Factors change places, see `Blas::run`.
        for (attribute, layout) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, b),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, a),
        ] {
            let transposed = i32::from(layout.by_columns); // CUBLAS_OP_N is 0, CUBLAS_OP_T is 1.
            // SAFETY: the attribute is a 32-bit number.
            unsafe {
                lt::set_matmul_desc_attribute(description, attribute, address(&transposed), 4)
            }
            .expect("cuBLASLt knows the attribute");
        }
        if let Some(epilogue) = epilogue {
            let epilogue = *epilogue as u32;
            // SAFETY: the attribute is a 32-bit number.
            unsafe {
                let name = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE;
                lt::set_matmul_desc_attribute(description, name, address(&epilogue), 4)
            }
            .expect("cuBLASLt knows the attribute");
        }
        let data = [factors, factors, result].map(|dtype| types(*dtype).0);
        let layouts = [0, 1, 2].map(|i| matrix_layout(&layouts[i], data[i]));
        let preference = preference(alignments);
        let [la, lb, lc] = layouts;
        // SAFETY: all were made above; the preference is destroyed once, after its use.
        let chosen = unsafe {
            let chosen =
                lt::get_matmul_algo_heuristic(handle, description, lb, la, lc, lc, preference);
            lt::destroy_matmul_pref(preference).expect("the preference exists");
            chosen
        };
        let algorithm =
            chosen.unwrap_or_else(|error| panic!("no algorithm for {key:?}: {error:?}")).algo;
        Plan { description, layouts, algorithm }
    }
}

impl Plan {
    /// Points the epilogue to its tensor, which is a vector or contiguous.
    fn set_extra(&self, extra: &Extra, at: cu::CUdeviceptr) {
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        let set = |attribute, value: *const c_void| {
            // SAFETY: both attributes that are set here are 64-bit numbers.
            unsafe { lt::set_matmul_desc_attribute(self.description, attribute, value, 8) }
                .expect("cuBLASLt knows the attribute");
        };
        match extra {
            Extra::None | Extra::Add(_) => {}
            Extra::Vector(_) => set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(&at)),
            Extra::Gelu(aux) => {
                let columns = *aux.meta.shape().last().expect("a matrix") as i64;
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, address(&at));
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, address(&columns));
            }
        }
    }
}

/// The types of the elements, of the sums and of the factors of a product.
fn types(
    dtype: DType,
) -> (lt_sys::cudaDataType, lt_sys::cublasComputeType_t, lt_sys::cudaDataType) {
    use lt_sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F};
    use lt_sys::cudaDataType::{CUDA_R_16BF, CUDA_R_32F, CUDA_R_64F};
    match dtype {
        DType::F32 => (CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::BF16 => (CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::F64 => (CUDA_R_64F, CUBLAS_COMPUTE_64F, CUDA_R_64F),
        other => panic!("products of {other:?} are not supported; cast to f32, bf16 or f64"),
    }
}

/// What an algorithm may use: the workspace, the alignments (as powers of two) of a, b, the product
/// and what is added to it.
fn preference(alignments: &[u32; 4]) -> lt_sys::cublasLtMatmulPreference_t {
    use lt_sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let preference = lt::create_matmul_pref().expect("a product's preference");
    let set = |attribute, value: *const c_void, size| {
        // SAFETY: each value has the attribute's size, given beside it.
        unsafe { lt::set_matmul_pref_attribute(preference, attribute, value, size) }
            .expect("cuBLASLt knows the attribute");
    };
    set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, address(&WORKSPACE), 8);
    let c = if alignments[3] < alignments[2] { 3 } else { 2 };
    for (attribute, at) in [
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 1),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 0),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 2),
    ] {
        set(attribute, address(&(1u32 << alignments[at])), 4);
    }
    // Parts of a split inner sum are added in f32, in one order.
    let schemes = lt_sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, address(&schemes), 4);
    preference
}

fn address<T>(value: &T) -> *const c_void {
    (&raw const *value).cast()
}

/// cuBLASLt's description of `layout`, whose rows are its columns.
fn matrix_layout(layout: &Layout, data: lt_sys::cudaDataType) -> lt_sys::cublasLtMatrixLayout_t {
    let Layout { rows, columns, leading, by_columns, batch, batch_stride } = *layout;
    let [fast, slow] = if by_columns { [rows, columns] } else { [columns, rows] };
    let made = lt::create_matrix_layout(data, fast, slow, leading).expect("a matrix layout");
    use lt_sys::cublasLtMatrixLayoutAttribute_t as Attribute;
    // SAFETY: the attributes are a 32-bit and a 64-bit number.
    unsafe {
        lt::set_matrix_layout_attribute(
            made,
            Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            address(&batch),
            4,
        )
        .and_then(|()| {
            lt::set_matrix_layout_attribute(
                made,
                Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                address(&batch_stride),
                8,
            )
        })
        .expect("cuBLASLt knows the attributes");
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leading stride, whether by columns, batch, batch stride.
    type Found = Option<(i64, bool, i32, i64)>;

    fn layout(shape: &[usize], strides: &[usize]) -> Found {
        Layout::of(shape, strides).map(|l| (l.leading, l.by_columns, l.batch, l.batch_stride))
    }

    #[test]
    fn a_layout_is_found_where_one_describes_the_matrices() {
        let cases: [(&[usize], &[usize], Found); 12] = [
            (&[3, 5], &[5, 1], Some((5, false, 1, 0))),
            (&[3, 5], &[8, 1], Some((8, false, 1, 0))), // Padded rows.
            (&[3, 5], &[1, 3], Some((3, true, 1, 0))),  // Transposed.
            (&[3, 5], &[2, 10], None),
            (&[3, 5], &[0, 1], None), // One row, expanded.
            (&[1, 5], &[0, 1], Some((5, false, 1, 0))),
            (&[3, 1], &[1, 7], Some((1, false, 1, 0))),
            (&[1, 5], &[1, 4], Some((4, true, 1, 0))),
            (&[2, 4, 3, 5], &[60, 15, 5, 1], Some((5, false, 8, 15))),
            (&[2, 4, 3, 5], &[60, 5, 20, 1], None), // [batch, seq_len, heads, head_dim] seen by heads.
            (&[1, 4, 3, 5], &[60, 5, 20, 1], Some((20, false, 4, 5))),
            (&[2, 4, 3, 5], &[0, 0, 5, 1], Some((5, false, 8, 0))), // One matrix for all.
        ];
        for (shape, strides, want) in cases {
            assert_eq!(layout(shape, strides), want, "{shape:?} {strides:?}");
        }
    }
}
