//! Days of the calendar, in UTC.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Seconds of a day.
pub(crate) const DAY_S: u64 = 86_400;
/// Days from 1 March of the year 0 to 1 January 1970.
const EPOCH: u64 = 719_468;
/// Days of 400 years.
const ERA: u64 = 146_097;
const YEARS: std::ops::RangeInclusive<u64> = 1970..=9999;

/// A day.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Date {
    year: u64,
    month: u64,
    day: u64,
}

/// A text that is not a day.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a date: say it as YYYY-MM-DD, from 1970-01-01 to 9999-12-31")]
pub struct ParseDateError(String);

impl Date {
    /// Returns the day of a moment, in seconds since 1970.
    pub fn of(seconds: u64) -> Self {
        // Years are counted from March on: a leap day is then the last of its year.
        let days = seconds / DAY_S + EPOCH;
        let (era, day) = (days / ERA, days % ERA);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let (year, month) = match month {
            0..10 => (year, month + 3),
            _ => (year + 1, month - 9),
        };
        let year = era * 400 + year;
        match YEARS.contains(&year) {
            true => Self { year, month, day },
            false => Self {
                year: *YEARS.end(),
                month: 12,
                day: 31,
            },
        }
    }

    /// Returns its first moment, in seconds since 1970.
    pub fn seconds(self) -> u64 {
        let (year, month) = match self.month {
            3.. => (self.year, self.month - 3),
            month => (self.year - 1, month + 9),
        };
        let (era, year) = (year / 400, year % 400);
        let day = (153 * month + 2) / 5 + self.day - 1;
        let day = 365 * year + year / 4 - year / 100 + day;
        (era * ERA + day - EPOCH) * DAY_S
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

impl FromStr for Date {
    type Err = ParseDateError;

    fn from_str(text: &str) -> Result<Self, ParseDateError> {
        let refused = || ParseDateError(text.chars().take(40).collect());
        let digits = |part: &str, count: usize| {
            let is_number = part.len() == count && part.bytes().all(|c| c.is_ascii_digit());
            let number = part.parse().ok();
            number.filter(|_| is_number)
        };
        let parse = || {
            let (year, rest) = text.split_once('-')?;
            let (month, day) = rest.split_once('-')?;
            let year = digits(year, 4).filter(|year| YEARS.contains(year))?;
            let month = digits(month, 2).filter(|month| (1..=12).contains(month))?;
            let day = digits(day, 2).filter(|day| (1..=31).contains(day))?;
            Some(Self { year, month, day })
        };
        // A day that the month does not have becomes one of the next month.
        let is_same = |date: &Self| Self::of(date.seconds()) == *date;
        parse().filter(is_same).ok_or_else(refused)
    }
}

impl TryFrom<String> for Date {
    type Error = ParseDateError;

    fn try_from(text: String) -> Result<Self, ParseDateError> {
        text.parse()
    }
}

impl From<Date> for String {
    fn from(date: Date) -> Self {
        date.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_day_is_its_text() {
        let mut last = None;
        for day in 0..200_000 {
            let date = Date::of(day * DAY_S + 4000);
            assert_eq!(date.seconds(), day * DAY_S);
            assert_eq!(date.to_string().parse(), Ok(date));
            assert!(last < Some(date));
            last = Some(date);
        }
        assert_eq!(Date::of(1_796_000_000).to_string(), "2026-11-30");
        assert_eq!(Date::of(951_782_400).to_string(), "2000-02-29");
        assert_eq!(Date::of(u64::MAX).to_string(), "9999-12-31");
    }

    #[test]
    fn what_is_no_day_is_refused() {
        for text in [
            "",
            "2026",
            "2026-11",
            "2026-11-31",
            "2026-02-29",
            "2100-02-29",
            "2026-13-01",
            "2026-00-01",
            "2026-01-00",
            "26-01-01",
            "2026-1-1",
            "1969-12-31",
            "2026-11-30 ",
            "+026-11-30",
            "2026-11-3a",
        ] {
            assert!(text.parse::<Date>().is_err(), "{text}");
        }
    }
}
