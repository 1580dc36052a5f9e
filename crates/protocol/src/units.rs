//! Quantities in the form in which users write and read them: `300ms`, `80mbit`, `4GiB`.

use std::time::Duration;

/// A text that is not a valid quantity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not {expected}")]
pub struct ParseUnitError {
    text: String,
    expected: &'static str,
}

fn parse(text: &str, units: &[(&str, f64)], expected: &'static str) -> Result<f64, ParseUnitError> {
    let error = || ParseUnitError {
        text: text.chars().take(40).collect(),
        expected,
    };
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| error())?;
    let unit = unit.trim().to_ascii_lowercase();
    let (_, factor) = units
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(error)?;
    let value = number * factor;
    if value.is_finite() && value < 1e18 {
        Ok(value)
    } else {
        Err(error())
    }
}

/// Parses a time such as `300ms`, `5s`, `1.5s`, `2min` or `2m`, `7d`.
pub fn parse_duration(text: &str) -> Result<Duration, ParseUnitError> {
    let units = [
        ("us", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("min", 60.0),
        ("m", 60.0),
        ("h", 3600.0),
        ("d", 86_400.0),
    ];
    parse(text, &units, "a time (say 300ms, 5s or 2min)").map(Duration::from_secs_f64)
}

/// Parses a rate such as `80mbit` or `1gbit`, in bits per second.
pub fn parse_bit_rate(text: &str) -> Result<u64, ParseUnitError> {
    let units = [("bit", 1.0), ("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
    let rate = parse(text, &units, "a rate (say 80mbit or 1gbit)")?;
    Ok(rate as u64)
}

/// Parses a size such as `256MiB`, `4GiB` or `4096`, in bytes.
pub fn parse_bytes(text: &str) -> Result<u64, ParseUnitError> {
    let units = [
        ("", 1.0),
        ("b", 1.0),
        ("kib", 1024.0),
        ("mib", 1048576.0),
        ("gib", 1073741824.0),
        ("tib", 1099511627776.0),
    ];
    parse(text, &units, "a size (say 256MiB or 4GiB)").map(|size| size as u64)
}

/// Formats a number of bytes with a binary unit: `410 MiB`, `6.4 GiB`.
pub fn show_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    show(value, unit)
}

/// Formats a rate in bits per second with a decimal unit: `94 Mbit/s`.
pub fn show_bit_rate(bits_per_s: u64) -> String {
    let mut value = bits_per_s as f64;
    let mut unit = "bit/s";
    for next in ["kbit/s", "Mbit/s", "Gbit/s"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    show(value, unit)
}

/// Formats a time in the unit that fits: `64 ms`, `8.1 s`, `41 s`, `2 min 5 s`.
pub fn show_duration(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 0.9995 {
        show(seconds * 1e3, "ms")
    } else if seconds < 119.5 {
        show(seconds, "s")
    } else {
        let whole = seconds.round() as u64;
        format!("{} min {} s", whole / 60, whole % 60)
    }
}

fn show(value: f64, unit: &str) -> String {
    if value < 9.95 && value.fract() != 0.0 {
        format!("{value:.1} {unit}")
    } else {
        format!("{value:.0} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_bit_rate("80mbit"), Ok(80_000_000));
        assert_eq!(parse_bytes("4GiB"), Ok(4 << 30));
        for text in ["", "ms", "-1s", "1e400s", "3 parsecs", "1.2.3s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn quantities_are_shown() {
        assert_eq!(show_bytes(410 << 20), "410 MiB");
        assert_eq!(show_bytes((6.4 * 1073741824.0) as u64), "6.4 GiB");
        assert_eq!(show_bit_rate(94_000_000), "94 Mbit/s");
        assert_eq!(show_duration(Duration::from_millis(64)), "64 ms");
        assert_eq!(show_duration(Duration::from_secs(41)), "41 s");
        assert_eq!(show_duration(Duration::from_secs(125)), "2 min 5 s");
    }
}
