//! Numbers in e4m3: 8 bits, of which 4 are the exponent and 3 the mantissa.
//!
//! The largest is 448. There is no infinity; the bits 0x7f and 0xff are NaN (Micikevicius et al., "FP8 formats
//! for deep learning", 2022, table 1).

use cubecl::prelude::*;

use super::asm::{emit, name_of};

/// Four numbers rounded to nearest, ties to even, as the bytes of a word, the first in its lowest byte. Numbers
/// above 448 become 448, NaN stays NaN.
#[cube]
pub fn four_e4m3(a: f32, b: f32, c: f32, d: f32) -> u32 {
    let mut numbers = Array::<f32>::new(4usize);
    numbers[0] = a;
    numbers[1] = b;
    numbers[2] = c;
    numbers[3] = d;
    let mut word = Array::<u32>::new(1usize);
    convert(&numbers, &mut word);
    word[0]
}

/// PTX ISA, "cvt": of two numbers, the second operand is rounded into the lower byte.
#[cube]
#[expect(unused_variables, reason = "cubecl's intrinsics use their arguments in expansion")]
fn convert(numbers: &Array<f32>, word: &mut Array<u32>) {
    intrinsic!(|scope| {
        let (numbers, word) = (name_of(&numbers.expand), name_of(&word.expand));
        let inputs: Vec<String> = (0..4).map(|i| format!("\"f\"({numbers}[{i}])")).collect();
        let text = format!(
            "asm(\"{{\\n.reg .b16 low, high;\\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\\n\
             cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\\nmov.b32 %0, {{low, high}};\\n}}\\n\" : \
             \"=r\"({word}[0]) : {});",
            inputs.join(", ")
        );
        emit(scope, "four numbers in e4m3", &text);
    })
}
