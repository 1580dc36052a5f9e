//! Fuzzes a manifest of a base image. The first byte selects the case: as it is, or its bits and
//! digests after a correct header for a given number of stripes, which a fuzzer does not find.

use longhaul_image::{Digest, Manifest, STRIPE_BYTES, Stripe};

/// Parses the input: a parsed value must be equal after encoding and parsing again.
pub(crate) fn run(data: &[u8]) {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    if how % 2 == 0 {
        check(data);
        return;
    }
    let stripes = u64::from(how / 2) + 1;
    let short = data.first().map_or(0, |byte| u64::from(*byte));
    let size_bytes = stripes * STRIPE_BYTES - short;
    let mut bytes = b"LHIMAGE\x01".to_vec();
    bytes.extend(size_bytes.to_le_bytes());
    bytes.extend(data);
    check(&bytes);
}

fn check(bytes: &[u8]) {
    let Ok(manifest) = Manifest::parse(bytes) else {
        return;
    };
    assert_eq!(manifest.bytes(), bytes, "one image, one manifest");
    assert_eq!(manifest.id().0, Digest::of(bytes));
    let stripes: Vec<_> = manifest.stripes().collect();
    assert_eq!(stripes.len(), manifest.stored_count() as usize);
    let again = Manifest::new(manifest.size_bytes(), &stripes).expect("it was one");
    assert_eq!(again, manifest);
    let mut stored = stripes.iter().peekable();
    let mut stored_bytes = 0;
    for index in 0..manifest.stripe_count() {
        let expected = stored.next_if(|(place, _)| *place == index);
        let expected = expected.map_or(Stripe::Hole, |(_, digest)| Stripe::Stored(*digest));
        assert_eq!(manifest.stripe(index), expected);
        let range = manifest.range(index);
        assert!(range.start < range.end && range.end <= manifest.size_bytes());
        if expected != Stripe::Hole {
            stored_bytes += range.end - range.start;
        }
    }
    assert!(stored.next().is_none(), "behind the end");
    assert_eq!(stored_bytes, manifest.stored_bytes());
}
