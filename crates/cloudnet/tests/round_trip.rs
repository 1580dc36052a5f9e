//! Tests that decoding restores every byte, over several passes and with caches that overflow.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use longhaul_cloudnet::{CACHE_BYTES, DecodeError, PAGE_BYTES, Page, Sent, blocks, strings};

const PAGES: usize = 200;

/// A small generator (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        bytes.fill_with(|| self.next() as u8);
    }
}

/// Returns pages of every kind: noise, zeros, copies, halves of others, and others shifted by some
/// bytes.
fn memory(random: &mut Random) -> Vec<Page> {
    let mut pages: Vec<Page> = Vec::new();
    for index in 0..PAGES {
        let mut page = [0; PAGE_BYTES];
        match index % 6 {
            0 | 1 => random.fill(&mut page),
            2 => {}
            3 => page = pages[random.below(index)],
            4 => {
                random.fill(&mut page);
                page[2048..].copy_from_slice(&pages[random.below(index)][2048..]);
            }
            _ => {
                let shift = 1 + random.below(500);
                random.fill(&mut page);
                page[shift..].copy_from_slice(&pages[index - 5][..PAGE_BYTES - shift]);
            }
        }
        pages.push(page);
    }
    pages
}

/// Changes some pages a little, some wholly, and swaps some.
fn change(memory: &mut [Page], random: &mut Random) {
    for _ in 0..PAGES / 2 {
        let index = random.below(PAGES);
        match random.below(4) {
            0 => random.fill(&mut memory[index]),
            1 => memory.swap(index, random.below(PAGES)),
            _ => {
                let start = random.below(PAGE_BYTES - 64);
                random.fill(&mut memory[index][start..start + 64]);
            }
        }
    }
}

/// Sends four versions of a memory and returns what each pass sent.
fn passes(
    mut encode: impl FnMut(u64, &Page, &mut Vec<u8>) -> Sent,
    mut decode: impl FnMut(&[u8], &mut dyn FnMut(u64, &Page)) -> Result<(), DecodeError>,
) -> Vec<(Sent, usize)> {
    let mut random = Random(7);
    let mut source = memory(&mut random);
    let mut destination = vec![[1; PAGE_BYTES]; PAGES];
    let mut all = Vec::new();
    for _ in 0..4 {
        let (mut sent, mut length) = (Sent::default(), 0);
        for (number, page) in source.iter().enumerate() {
            let mut bytes = Vec::new();
            sent += encode(number as u64, page, &mut bytes);
            length += bytes.len();
            decode(&bytes, &mut |number, page| {
                destination[number as usize] = *page
            })
            .unwrap();
        }
        assert!(destination == source);
        all.push((sent, length));
        change(&mut source, &mut random);
    }
    all
}

fn blocks_config(block_bytes: usize, cache_bytes: usize) -> blocks::Config {
    blocks::Config {
        block_bytes,
        cache_bytes,
        redundancy: true,
        deltas: true,
        pages: PAGES as u64,
    }
}

fn block_passes(config: blocks::Config) -> Vec<(Sent, usize)> {
    let mut encoder = blocks::Encoder::new(config).unwrap();
    let mut decoder = blocks::Decoder::new(config).unwrap();
    passes(
        |number, page, out| encoder.page(number, page, out).unwrap(),
        |bytes, apply| decoder.pages(bytes, apply),
    )
}

fn string_passes(fingerprints: usize, cache_bytes: usize) -> Vec<(Sent, usize)> {
    let config = strings::Config {
        fingerprints,
        cache_bytes,
        pages: PAGES as u64,
    };
    let mut encoder = strings::Encoder::new(config).unwrap();
    let mut decoder = strings::Decoder::new(config).unwrap();
    passes(
        |number, page, out| encoder.page(number, page, out).unwrap(),
        |bytes, apply| decoder.pages(bytes, apply),
    )
}

#[test]
fn blocks_come_back_whatever_their_size_and_the_cache() {
    for block_bytes in [64, 256, 1024, 2048, 4096] {
        for cache_bytes in [PAGE_BYTES, 64 << 10, 4 << 20] {
            for (redundancy, deltas) in [(true, true), (true, false), (false, true), (false, false)]
            {
                let config = blocks::Config {
                    redundancy,
                    deltas,
                    ..blocks_config(block_bytes, cache_bytes)
                };
                let passes = block_passes(config);
                let of_all = (PAGES * PAGE_BYTES) as u64;
                for (pass, (sent, _)) in passes.iter().enumerate() {
                    assert_eq!(sent.found + sent.delta + sent.whole, of_all);
                    assert!(deltas && pass > 0 || sent.delta == 0);
                    assert!(redundancy || deltas && pass > 0 || sent.found == 0);
                }
            }
        }
    }
}

#[test]
fn strings_come_back_whatever_their_fingerprints_and_the_cache() {
    for fingerprints in [1, 4, 16, 64] {
        for cache_bytes in [PAGE_BYTES, 64 << 10, 4 << 20] {
            for (sent, _) in string_passes(fingerprints, cache_bytes) {
                assert_eq!(sent.found + sent.whole, (PAGES * PAGE_BYTES) as u64);
            }
        }
    }
}

#[test]
fn smaller_blocks_and_more_fingerprints_find_more() {
    let first = |passes: Vec<(Sent, usize)>| passes[0].0.found as f64 / (PAGES * PAGE_BYTES) as f64;
    let whole = first(block_passes(blocks_config(4096, 4 << 20)));
    let halves = first(block_passes(blocks_config(2048, 4 << 20)));
    // Of six pages one is zero and one a copy; one more is a copy in its second half.
    assert!((0.30..0.36).contains(&whole), "{whole}");
    assert!((0.38..0.44).contains(&halves), "{halves}");
    // Only strings find the shifted one.
    let strings = first(string_passes(16, 4 << 20));
    assert!((0.48..0.60).contains(&strings), "{strings}");
    assert!(first(string_passes(1, 4 << 20)) < strings);
}

#[test]
fn deltas_make_later_passes_small() {
    let with = block_passes(blocks_config(4096, 4 << 20));
    let without = block_passes(blocks::Config {
        deltas: false,
        ..blocks_config(4096, 4 << 20)
    });
    assert_eq!(with[0], without[0]);
    assert!(with[1].1 * 10 < without[1].1 * 9, "{with:?} {without:?}");
    assert!(with[1].0.delta > 0);
}

#[test]
fn what_an_encoder_would_not_say_is_refused() {
    let config = blocks_config(1024, CACHE_BYTES);
    let mut encoder = blocks::Encoder::new(config).unwrap();
    let mut out = Vec::new();
    assert!(
        encoder
            .page(PAGES as u64, &[1; PAGE_BYTES], &mut out)
            .is_err()
    );
    encoder.page(3, &[1; PAGE_BYTES], &mut out).unwrap();
    let decode = |bytes: &[u8]| {
        blocks::Decoder::new(config)
            .unwrap()
            .pages(bytes, |_, _| {})
    };
    assert_eq!(decode(&out), Ok(()));
    assert_eq!(decode(&out[..out.len() - 1]), Err(DecodeError::Short));
    // The second time the same bytes would go to another entry.
    let twice = [&out[..], &out[..]].concat();
    assert_eq!(decode(&twice), Err(DecodeError::Cache(-1)));
    let mut unknown = out.clone();
    unknown[8..12].copy_from_slice(&5_i32.to_le_bytes());
    assert_eq!(decode(&unknown), Err(DecodeError::Cache(5)));
    out[0] = 201;
    assert!(matches!(decode(&out), Err(DecodeError::Page(_))));
    assert!(blocks::Encoder::new(blocks_config(3000, 1 << 20)).is_err());
    assert!(blocks::Encoder::new(blocks_config(4096, 100)).is_err());

    let config = strings::Config {
        fingerprints: 4,
        cache_bytes: 1 << 20,
        pages: 1,
    };
    let decode = |bytes: &[u8]| {
        strings::Decoder::new(config)
            .unwrap()
            .pages(bytes, |_, _| {})
    };
    let number = [0; 8];
    let string = |index: i32, offset: u16, length: u16| {
        let mut bytes = number.to_vec();
        bytes.extend_from_slice(&index.to_le_bytes());
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes
    };
    assert_eq!(decode(&string(0, 0, 9)), Err(DecodeError::Cache(0)));
    assert_eq!(decode(&string(0, 0, 0)), Err(DecodeError::Bounds));
    assert_eq!(decode(&string(0, 0, 5000)), Err(DecodeError::Bounds));
    assert_eq!(decode(&string(-1, 9, 0)), Err(DecodeError::Short));
    assert!(
        strings::Encoder::new(strings::Config {
            fingerprints: 3,
            ..config
        })
        .is_err()
    );
}
