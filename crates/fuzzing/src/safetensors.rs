//! Changes of safetensors files: their JSON header, and any bytes.

use proptest::prelude::*;
use proptest::sample::Index;

use super::mutate::mutated;
use super::text::{self, JSON};

/// Bytes of the length before the header.
const LENGTH: usize = 8;

/// Where the JSON header of a safetensors file stands.
///
/// # Panics
/// When the file is shorter than its header.
pub fn header_of(file: &[u8]) -> std::ops::Range<usize> {
    let length = u64::from_le_bytes(file[..LENGTH].try_into().unwrap());
    LENGTH..LENGTH + length as usize
}

/// One of the seeds with changes of its bytes, or of the keys and values of its header. The length of a
/// changed header is right in three of four cases.
pub fn mutated_safetensors(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> + use<> {
    let words = ["\"F32\"", "\"shape\"", "\"data_offsets\"", "\"__metadata__\"", "[0,0]"];
    let bytes = mutated(seeds.clone(), &words);
    let changes = prop::collection::vec(text::change(JSON, &[]), 1..4);
    let header = (any::<Index>(), changes, 0..4u8).prop_map(move |(seed, changes, right)| {
        let file = &seeds[seed.index(seeds.len())];
        let place = header_of(file);
        // A line per tensor, so that changes of lines add and remove tensors.
        let header = String::from_utf8_lossy(&file[place.clone()]).replace("},\"", "},\n\"");
        let mut header = header.into_bytes();
        changes.iter().for_each(|change| text::apply(change, JSON, &mut header));
        let length = if right > 0 { header.len() } else { place.len() } as u64;
        [&length.to_le_bytes(), &header[..], &file[place.end..]].concat()
    });
    prop_oneof![bytes, header]
}
