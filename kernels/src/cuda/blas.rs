//! Matrix products on CUDA by cuBLASLt.
//!
//! f32 products are computed in f32, those of linear layers in TF32 with [`Rounding::Tf32`]; bf16 and e4m3
//! products accumulate in f32. Equal inputs give equal bits.
//!
//! Products run on a [`SideStream`].

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use burn::tensor::DType;
use burn_cubecl::kernel::{cast, into_contiguous};
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys as lt_sys;
use cudarc::driver::sys as cu;

use super::side_stream::{SideStream, check};
use super::{CudaTensor, empty};

/// Bytes of scratch memory, as NVIDIA recommends for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Most cached plans. The cache must be bounded, because decoding makes new plans at every token.
const MOST_PLANS: usize = 4096;

/// The alignment in bytes that cuBLASLt assumes by default.
const BEST_ALIGNMENT: u64 = 256;

/// What linear layers round the factors of their products to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Rounding {
    /// Nothing: they are multiplied as they are.
    None,
    /// f32 factors to TF32, with 10 bits of mantissa instead of 23, to use tensor cores.
    Tf32,
    /// bf16 factors to e4m3, with 3 bits of mantissa instead of 7 and one scale per tensor, where the
    /// kernels serve the sizes ([`linear`](crate::ops::linear)).
    E4m3,
}

/// The [`Rounding`] of this process.
static ROUNDING: AtomicU8 = AtomicU8::new(Rounding::None as u8);

/// Sets what the linear layers of this process round the factors of their products to; nothing by default.
/// [`matmul`] does not round.
pub fn round_factors(to: Rounding) {
    ROUNDING.store(to as u8, Ordering::Relaxed);
}

/// What [`round_factors`] was last set to.
pub fn rounding() -> Rounding {
    let set = ROUNDING.load(Ordering::Relaxed);
    [Rounding::Tf32, Rounding::E4m3].into_iter().find(|x| *x as u8 == set).unwrap_or(Rounding::None)
}

/// a · b for each matrix of a batch.
///
/// - `a`: `[…, m, k]`, of any strides
/// - `b`: `[…, k, n]`, with the same leading sizes
///
/// Returns `[…, m, n]`, contiguous, of the inputs' type: f32, bf16 or f64.
///
/// # Panics
/// When the sizes or types do not match, or cuBLASLt fails.
pub fn matmul(a: CudaTensor, b: CudaTensor) -> CudaTensor {
    let dtype = a.dtype;
    run(a, b, dtype, Epilogue::None, Arithmetic::Plain)
}

/// As [`matmul`], for inputs in f32 or bf16 and with a result in f32.
pub fn matmul_f32(a: CudaTensor, b: CudaTensor) -> CudaTensor {
    run(a, b, DType::F32, Epilogue::None, Arithmetic::Plain)
}

/// The epilogue of a product.
pub enum Epilogue {
    /// No epilogue.
    None,
    /// Adds a tensor of the product's shape in f32 (some of cuBLASLt's algorithms for small bf16 products
    /// round the product first). The result is written to its buffer unless that is shared.
    Add(CudaTensor),
    /// Adds a vector of n elements to each row.
    Bias(CudaTensor),
    /// Applies GELU in its tanh form, and writes its argument, the product, to this contiguous tensor.
    Gelu(CudaTensor),
}

/// A linear layer's a · b for each matrix of a batch, as [`matmul`], then the epilogue; the result is
/// of type `dtype`: the inputs' own, or f32 for bf16 inputs.
///
/// # Panics
/// When the sizes or types do not match, or cuBLASLt fails.
pub fn product(a: CudaTensor, b: CudaTensor, dtype: DType, epilogue: Epilogue) -> CudaTensor {
    let tf32 = a.dtype == DType::F32 && rounding() == Rounding::Tf32;
    let arithmetic = if tf32 { Arithmetic::Tf32 } else { Arithmetic::Plain };
    run(a, b, dtype, epilogue, arithmetic)
}

/// A matrix in e4m3: value times scale.
#[derive(Clone, Debug)]
pub struct E4m3Matrix {
    /// e4m3 numbers as bytes, `[rows, columns]`, contiguous; both sizes are multiples of 16.
    pub values: CudaTensor,
    /// The scale, f32, `[1]`.
    pub scale: CudaTensor,
}

/// How an e4m3 product is accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accumulation {
    /// In the registers of the tensor cores, which keep fewer bits than f32.
    Fast,
    /// As `Fast` over short parts of the inner dimension, whose sums are added in f32.
    Precise,
}

/// a bᵀ of e4m3 matrices, in bf16 or f32, with an epilogue other than GELU.
///
/// - `a`: `[m, k]`
/// - `b`: `[n, k]`
///
/// Returns `[m, n]`.
///
/// # Panics
/// When the sizes or types do not match, or cuBLASLt fails.
pub fn product_of_e4m3(
    a: &E4m3Matrix,
    b: &E4m3Matrix,
    dtype: DType,
    epilogue: Epilogue,
    accumulation: Accumulation,
) -> CudaTensor {
    for E4m3Matrix { values, scale } in [a, b] {
        let [rows, columns] = values.meta.shape().dims();
        assert!(
            rows.is_multiple_of(E4M3_MULTIPLE) && columns.is_multiple_of(E4M3_MULTIPLE),
            "an e4m3 factor of {rows} x {columns}; both must be multiples of {E4M3_MULTIPLE}"
        );
        assert!(values.is_contiguous(), "an e4m3 factor with gaps");
        assert_eq!((values.dtype, scale.dtype), (DType::U8, DType::F32), "an e4m3 factor's types");
    }
    let mut b_values = b.values.clone();
    b_values.meta.swap(0, 1);
    let scales = [&a.scale, &b.scale];
    run(a.values.clone(), b_values, dtype, epilogue, Arithmetic::E4m3(accumulation, scales))
}

/// cuBLASLt requires the sizes of e4m3 factors to be multiples of this.
pub const E4M3_MULTIPLE: usize = 16;

/// How the factors are read and their products summed.
#[derive(Clone, Copy)]
enum Arithmetic<'a> {
    /// Factors as they are, sums in f32, or f64 for f64 factors.
    Plain,
    /// f32 factors, rounded to TF32.
    Tf32,
    /// e4m3 factors times the scales of a and b.
    E4m3(Accumulation, [&'a CudaTensor; 2]),
}

impl Arithmetic<'_> {
    fn kind(self) -> ArithmeticKind {
        match self {
            Arithmetic::Plain => ArithmeticKind::Plain,
            Arithmetic::Tf32 => ArithmeticKind::Tf32,
            Arithmetic::E4m3(accumulation, _) => ArithmeticKind::E4m3(accumulation),
        }
    }
}

/// [`Arithmetic`] without the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ArithmeticKind {
    Plain,
    Tf32,
    E4m3(Accumulation),
}

fn run(
    a: CudaTensor,
    b: CudaTensor,
    dtype: DType,
    epilogue: Epilogue,
    arithmetic: Arithmetic,
) -> CudaTensor {
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
    let (a, b) = (Operand::new(a), Operand::new(b));
    let (out, extra) = match epilogue {
        Epilogue::None => (empty(&a.tensor, &shape, dtype), EpilogueTensor::None),
        Epilogue::Add(term) => {
            assert_eq!(
                (term.meta.shape().to_vec(), term.dtype),
                (shape.clone(), dtype),
                "the term"
            );
            let term = into_contiguous(term);
            let own = term.can_mut();
            let out = if own { term.clone() } else { empty(&a.tensor, &shape, dtype) };
            (out, EpilogueTensor::Add(term))
        }
        Epilogue::Bias(bias) => {
            assert_eq!(bias.meta.shape().to_vec(), shape[rank - 1..], "the bias");
            let bias = into_contiguous(cast(bias, dtype));
            (empty(&a.tensor, &shape, dtype), EpilogueTensor::Vector(bias))
        }
        Epilogue::Gelu(aux) => (empty(&a.tensor, &shape, dtype), EpilogueTensor::Gelu(aux)),
    };
    if let EpilogueTensor::Gelu(aux) = &extra {
        assert_eq!((aux.meta.shape().to_vec(), aux.dtype), (shape, dtype), "GELU's argument");
        assert!(aux.is_contiguous(), "GELU's argument has gaps");
    }
    // A failed product leaves nothing behind that the next one uses.
    let mut all = BLAS.lock().unwrap_or_else(PoisonError::into_inner);
    let blas = all.entry(index).or_insert_with(|| Blas::new(index));
    blas.run(&a, &b, &Operand::new(out.clone()), &extra, arithmetic);
    out
}

/// The tensor of an [`Epilogue`], checked.
enum EpilogueTensor {
    None,
    Add(CudaTensor),
    Vector(CudaTensor),
    Gelu(CudaTensor),
}

impl EpilogueTensor {
    fn tensor(&self) -> Option<&CudaTensor> {
        match self {
            EpilogueTensor::None => None,
            EpilogueTensor::Add(x) | EpilogueTensor::Vector(x) | EpilogueTensor::Gelu(x) => Some(x),
        }
    }

    /// cuBLASLt's epilogue; `None` for a sum, which is operand C.
    fn kind(&self) -> Option<lt_sys::cublasLtEpilogue_t> {
        use lt_sys::cublasLtEpilogue_t as Kind;
        match self {
            EpilogueTensor::None | EpilogueTensor::Add(_) => None,
            EpilogueTensor::Vector(_) => Some(Kind::CUBLASLT_EPILOGUE_BIAS),
            EpilogueTensor::Gelu(_) => Some(Kind::CUBLASLT_EPILOGUE_GELU_AUX),
        }
    }
}

/// The memory layout of a batch of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Layout {
    rows: u64,
    columns: u64,
    /// The stride between rows or, if `by_columns`, between columns, in elements.
    leading: i64,
    /// Whether columns, rather than rows, are contiguous.
    by_columns: bool,
    batch: i32,
    batch_stride: i64,
}

impl Layout {
    /// The layout of a tensor, or `None` if no single one describes it.
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

/// A tensor that cuBLASLt can read or write without a copy.
struct Operand {
    tensor: CudaTensor,
    layout: Layout,
}

impl Operand {
    fn new(tensor: CudaTensor) -> Self {
        let layout = |x: &CudaTensor| Layout::of(x.meta.shape(), x.meta.strides());
        if let Some(layout) = layout(&tensor) {
            return Operand { tensor, layout };
        }
        let tensor = into_contiguous(tensor);
        let layout = layout(&tensor).expect("contiguous matrices have a layout");
        Operand { tensor, layout }
    }
}

/// The key of a cached plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PlanKey {
    /// The layouts of a, b and the product.
    layouts: [Layout; 3],
    /// The alignments of their addresses and of the epilogue's tensor, as log₂ of bytes.
    alignments: [u32; 4],
    /// The types of the factors and of the product.
    types: [DType; 2],
    arithmetic: ArithmeticKind,
    epilogue: Option<lt_sys::cublasLtEpilogue_t>,
}

/// A product ready to run: cuBLASLt's descriptors and the algorithm it chose.
struct Plan {
    description: lt_sys::cublasLtMatmulDesc_t,
    layouts: [lt_sys::cublasLtMatrixLayout_t; 3],
    algorithm: lt_sys::cublasLtMatmulAlgo_t,
}

/// cuBLASLt on one device.
struct Blas {
    handle: lt_sys::cublasLtHandle_t,
    stream: SideStream,
    workspace: cu::CUdeviceptr,
    plans: HashMap<PlanKey, Plan>,
}

/// One entry per device used, for the lifetime of the process.
static BLAS: Mutex<BTreeMap<usize, Blas>> = Mutex::new(BTreeMap::new());

// SAFETY: the pointers are CUDA's and cuBLASLt's own objects, usable from any thread; the mutex
// around every `Blas` keeps their use exclusive.
unsafe impl Send for Blas {}

impl Blas {
    fn new(index: usize) -> Self {
        let (stream, mut workspace) = (SideStream::new(index), 0);
        // SAFETY: writes one address; the memory is of the stream's context, which is current.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&mut workspace, WORKSPACE) });
        let handle = lt::create_handle().expect("cuBLASLt starts");
        Blas { handle, stream, workspace, plans: HashMap::new() }
    }

    fn run(
        &mut self,
        a: &Operand,
        b: &Operand,
        out: &Operand,
        extra: &EpilogueTensor,
        arithmetic: Arithmetic,
    ) {
        let operands = [a, b, out];
        // Blocks until the work that writes these buffers is issued. Kept until the end, so that the
        // buffers stay allocated.
        let resource =
            |x: &CudaTensor| x.client.get_resource(x.handle.clone()).expect("the buffer exists");
        let resources = operands.map(|x| resource(&x.tensor));
        let at = [0, 1, 2].map(|i| resources[i].resource().ptr);
        let extra_resource = extra.tensor().map(resource);
        let extra_at = extra_resource.as_ref().map_or(0, |x| x.resource().ptr);
        let scale_resources = match arithmetic {
            Arithmetic::Plain | Arithmetic::Tf32 => None,
            Arithmetic::E4m3(_, scales) => Some(scales.map(resource)),
        };
        let scales_at =
            scale_resources.as_ref().map(|scales| scales.each_ref().map(|x| x.resource().ptr));
        // The alignment of every matrix of the batch, not only of the first.
        let align = |address: u64| address.trailing_zeros().min(BEST_ALIGNMENT.ilog2());
        let [of_a, of_b, of_out] = [0, 1, 2].map(|i| {
            let Operand { tensor, layout } = operands[i];
            align(at[i] | (layout.batch_stride as u64 * tensor.dtype.size() as u64))
        });
        let key = PlanKey {
            layouts: operands.map(|x| x.layout),
            alignments: [of_a, of_b, of_out, align(extra_at)],
            types: [a.tensor.dtype, out.tensor.dtype],
            arithmetic: arithmetic.kind(),
            epilogue: extra.kind(),
        };
        let handle = self.handle;
        if self.plans.len() >= MOST_PLANS {
            self.plans.clear();
        }
        let plan =
            self.plans.entry(key.clone()).or_insert_with(|| Plan::new(handle, &key, scales_at));
        plan.set_extra(extra, extra_at);
        set_scales(plan.description, scales_at);
        let scale = Scale::new(a.tensor.dtype);
        let adds = matches!(extra, EpilogueTensor::Add(_));
        let (factor, term) = if adds { (scale.one(), extra_at) } else { (scale.zero(), at[2]) };
        self.stream.begin(&a.tensor);
        // SAFETY: addresses and layouts describe buffers that `resources` keeps alive until the
        // last wait is issued; the workspace is used on this one stream only.
        unsafe {
            // In cuBLASLt's column order, row-major operands are their transposes: cᵀ = bᵀ aᵀ.
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
                self.stream.as_ptr().cast(),
            )
            .unwrap_or_else(|error| panic!("cublasLtMatmul of {key:?}: {error:?}"));
        }
        self.stream.end();
    }
}

/// The scales α and β, 1 and 0, in the scale type of a product.
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
        // SAFETY: made by `Plan::new` and destroyed once. cuBLASLt reads them only while it issues a
        // product.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.description);
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Plan {
    /// `scales` as in [`set_scales`]: any that exist while this function runs.
    fn new(
        handle: lt_sys::cublasLtHandle_t,
        key: &PlanKey,
        scales: Option<[cu::CUdeviceptr; 2]>,
    ) -> Self {
        let PlanKey { layouts, alignments, types: [operands, result], arithmetic, epilogue } = key;
        let (_, mut compute, scale) = types(*operands);
        if *arithmetic == ArithmeticKind::Tf32 {
            compute = lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32;
        }
        let [a, b, _] = layouts;
        let description = lt::create_matmul_desc(compute, scale).expect("a product's description");
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        // The operands are swapped, see `Blas::run`.
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
        set_scales(description, scales);
        if *arithmetic == ArithmeticKind::E4m3(Accumulation::Fast) {
            let fast = 1i8;
            // SAFETY: the attribute is an 8-bit number.
            unsafe {
                let name = Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM;
                lt::set_matmul_desc_attribute(description, name, address(&fast), 1)
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
        let data = [operands, operands, result].map(|dtype| types(*dtype).0);
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
    /// Sets the pointer to the epilogue's tensor, which is a vector or contiguous.
    fn set_extra(&self, extra: &EpilogueTensor, at: cu::CUdeviceptr) {
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        let set = |attribute, value: *const c_void| {
            // SAFETY: the attributes that are set here are 64-bit numbers.
            unsafe { lt::set_matmul_desc_attribute(self.description, attribute, value, 8) }
                .expect("cuBLASLt knows the attribute");
        };
        match extra {
            EpilogueTensor::None | EpilogueTensor::Add(_) => {}
            EpilogueTensor::Vector(_) => {
                set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, address(&at))
            }
            EpilogueTensor::Gelu(aux) => {
                let columns = *aux.meta.shape().last().expect("a matrix") as i64;
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, address(&at));
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, address(&columns));
            }
        }
    }
}

/// Sets the pointers to the scales of a and b, if the product has any.
fn set_scales(description: lt_sys::cublasLtMatmulDesc_t, scales: Option<[cu::CUdeviceptr; 2]>) {
    use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
    let Some([a, b]) = scales else { return };
    // The operands are swapped, see `Blas::run`.
    for (attribute, at) in [
        (Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b),
        (Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a),
    ] {
        // SAFETY: the attributes are 64-bit addresses.
        unsafe { lt::set_matmul_desc_attribute(description, attribute, address(&at), 8) }
            .expect("cuBLASLt knows the attribute");
    }
}

/// The data, compute and scale types of a product; bytes are e4m3 numbers.
fn types(
    dtype: DType,
) -> (lt_sys::cudaDataType, lt_sys::cublasComputeType_t, lt_sys::cudaDataType) {
    use lt_sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_64F};
    use lt_sys::cudaDataType::{CUDA_R_8F_E4M3, CUDA_R_16BF, CUDA_R_32F, CUDA_R_64F};
    match dtype {
        DType::F32 => (CUDA_R_32F, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::BF16 => (CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::U8 => (CUDA_R_8F_E4M3, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        DType::F64 => (CUDA_R_64F, CUBLAS_COMPUTE_64F, CUDA_R_64F),
        other => panic!("products of {other:?} are not supported; cast to f32, bf16 or f64"),
    }
}

/// The limits for an algorithm: the workspace, and the alignments (log₂ of bytes) of a, b, the product and
/// the epilogue's tensor.
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
    // Split-k partial sums are added in f32, in a fixed order.
    let schemes = lt_sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, address(&schemes), 4);
    preference
}

fn address<T>(value: &T) -> *const c_void {
    (&raw const *value).cast()
}

/// cuBLASLt's descriptor of `layout`. cuBLASLt is column-major, so rows become columns.
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
