//! The parity of a row: P and Q of RAID 6, over GF(2^8) with the polynomial 0x11d and the
//! generator 2 (docs/parcel.md, "Data and parity cells").

/// The low byte of the polynomial.
const REDUCTION: u8 = 0x1d;

/// Doubles each byte of eight.
fn double(bytes: u64) -> u64 {
    const LOW_7: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const LOW_1: u64 = 0x0101_0101_0101_0101;
    let overflow = (bytes >> 7) & LOW_1;
    ((bytes & LOW_7) << 1) ^ (overflow.wrapping_mul(u64::from(REDUCTION)))
}

/// Applies a function to each eight bytes of one slice and another, whose lengths are equal and a
/// multiple of eight.
fn combine(into: &mut [u8], from: &[u8], of: impl Fn(u64, u64) -> u64) {
    let (into, _) = into.as_chunks_mut();
    let (from, _) = from.as_chunks();
    for (to, from) in into.iter_mut().zip(from) {
        *to = of(u64::from_ne_bytes(*to), u64::from_ne_bytes(*from)).to_ne_bytes();
    }
}

/// Adds bytes to others.
pub(crate) fn add(into: &mut [u8], from: &[u8]) {
    combine(into, from, |to, from| to ^ from);
}

/// Computes P of the data of a row. Where there is `None`, it is computed with zeros.
pub(crate) fn p(data: &[Option<&[u8]>], into: &mut [u8]) {
    let mut parts = data.iter().flatten();
    match parts.next() {
        Some(first) => into.copy_from_slice(first),
        None => into.fill(0),
    }
    for part in parts {
        add(into, part);
    }
}

/// Computes Q of the data of a row. Where there is `None`, it is computed with zeros.
pub(crate) fn q(data: &[Option<&[u8]>], into: &mut [u8]) {
    into.fill(0);
    // Horner's rule: each step doubles what comes after.
    for part in data.iter().rev() {
        match part {
            Some(part) => combine(into, part, |sum, part| double(sum) ^ part),
            None => {
                let (words, _) = into.as_chunks_mut();
                for word in words {
                    *word = double(u64::from_ne_bytes(*word)).to_ne_bytes();
                }
            }
        }
    }
}

/// Multiplies two elements.
fn times(left: u8, right: u8) -> u8 {
    let (mut sum, mut shifted) = (0, left);
    for bit in 0..8 {
        if right >> bit & 1 == 1 {
            sum ^= shifted;
        }
        let overflow = shifted >> 7;
        shifted = (shifted << 1) ^ (overflow * REDUCTION);
    }
    sum
}

/// Returns 2 to a power.
fn power(exponent: usize) -> u8 {
    (0..exponent % 255).fold(1, |value, _| times(value, 2))
}

/// Returns what an element other than 0 has to be multiplied with to give 1: its power 254.
fn inverse(value: u8) -> u8 {
    (0..254).fold(1, |product, _| times(product, value))
}

/// Multiplies each byte by an element.
fn scale(bytes: &mut [u8], by: u8) {
    let table: [u8; 256] = std::array::from_fn(|value| times(value as u8, by));
    for byte in bytes {
        *byte = table.get(usize::from(*byte)).copied().unwrap_or(0);
    }
}

/// Recovers one data part from Q alone: `left` is the sum of Q, and of Q computed without it.
pub(crate) fn from_q(left: &mut [u8], x: usize) {
    scale(left, inverse(power(x)));
}

/// Recovers the data parts `x` and `y` from the sums of P and Q, and of those computed without
/// both: afterwards `a` is part `y`, and `b` is part `x`.
pub(crate) fn from_both(a: &mut [u8], b: &mut [u8], (x, y): (usize, usize)) {
    let (at_x, at_y) = (power(x), power(y));
    let mut scaled = a.to_vec();
    scale(&mut scaled, at_y);
    add(b, &scaled);
    scale(b, inverse(at_x ^ at_y));
    add(a, b);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_is_one() {
        for value in 1..=255 {
            assert_eq!(times(value, inverse(value)), 1, "{value}");
        }
        let mut powers: Vec<u8> = (0..255).map(power).collect();
        powers.sort_unstable();
        powers.dedup();
        assert_eq!(powers.len(), 255, "2 generates all elements but 0");
        assert_eq!(times(0x80, 2), 0x1d);
    }

    #[test]
    fn eight_bytes_are_doubled_as_one_is() {
        for value in 0..=255_u8 {
            let doubled = double(u64::from_ne_bytes([value; 8])).to_ne_bytes();
            assert_eq!(doubled, [times(value, 2); 8]);
        }
    }

    #[test]
    fn any_two_parts_are_recovered() {
        let parts: Vec<Vec<u8>> = (0..5_u8)
            .map(|n| (0..64_u8).map(|at| at.wrapping_mul(n + 3) ^ n).collect())
            .collect();
        let all: Vec<Option<&[u8]>> = parts.iter().map(|part| Some(&part[..])).collect();
        let (mut whole_p, mut whole_q) = (vec![0; 64], vec![0; 64]);
        p(&all, &mut whole_p);
        q(&all, &mut whole_q);
        for x in 0..5 {
            let mut without = all.clone();
            without[x] = None;
            let mut left = vec![0; 64];
            q(&without, &mut left);
            add(&mut left, &whole_q);
            from_q(&mut left, x);
            assert_eq!(left, parts[x]);
            for y in x + 1..5 {
                let mut without = without.clone();
                without[y] = None;
                let (mut a, mut b) = (vec![0; 64], vec![0; 64]);
                p(&without, &mut a);
                q(&without, &mut b);
                add(&mut a, &whole_p);
                add(&mut b, &whole_q);
                from_both(&mut a, &mut b, (x, y));
                assert_eq!((&b, &a), (&parts[x], &parts[y]), "{x} {y}");
            }
        }
    }
}
