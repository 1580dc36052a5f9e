//! The arguments of parcels.

use clap::{Args, Subcommand};
use longhaul_parcel::Date;
use longhaul_protocol::units::{parse_bit_rate, parse_bytes};
use std::path::PathBuf;
use std::str::FromStr;

#[derive(Debug, Args)]
pub(crate) struct ParcelArgs {
    /// The agent's configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: ParcelCommand,
}

/// A guest, and those of its disks that travel in a parcel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ParcelGuest {
    pub(crate) name: String,
    pub(crate) images: Vec<String>,
}

impl FromStr for ParcelGuest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        const FORM: &str = "say it as GUEST=IMAGE or GUEST=IMAGE,IMAGE";
        let (name, images) = text.split_once('=').ok_or(FORM)?;
        let images: Vec<String> = images.split(',').map(str::to_owned).collect();
        let is_empty = |text: &String| text.is_empty();
        match name.is_empty() || images.iter().any(is_empty) {
            true => Err(FORM),
            false => Ok(Self {
                name: name.to_owned(),
                images,
            }),
        }
    }
}

/// How much of the disks differs from one day to the next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Changes {
    Bytes(u64),
    /// A part of all, at most 1.
    Part(f64),
}

impl FromStr for Changes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some(percent) = text.strip_suffix('%') else {
            let bytes =
                parse_bytes(text).map_err(|error| format!("{error}, or a part (say 2%)"))?;
            return Ok(Self::Bytes(bytes));
        };
        let percent: Option<f64> = percent.trim().parse().ok();
        match percent.filter(|percent| (0.0..=100.0).contains(percent)) {
            Some(percent) => Ok(Self::Part(percent / 100.0)),
            None => Err("a part is a number from 0 to 100 before `%`".to_owned()),
        }
    }
}

fn parse_days(text: &str) -> Result<f64, &'static str> {
    const DAYS_MAX: f64 = 3650.0;
    let days: Option<f64> = text.parse().ok();
    days.filter(|days| (0.0..=DAYS_MAX).contains(days))
        .ok_or("days are a number from 0 to 3650, say 1 or 0.5")
}

fn parse_cost(text: &str) -> Result<f64, &'static str> {
    const COST_MAX: f64 = 1e12;
    let cost: Option<f64> = text.parse().ok();
    cost.filter(|cost| (0.0..=COST_MAX).contains(cost))
        .ok_or("a cost is a number without its currency, say 190 or 0.05")
}

fn parse_rate(text: &str) -> Result<u64, String> {
    let rate = parse_bytes(text).map_err(|error| error.to_string())?;
    match rate {
        0 => Err("a rate is more than 0".to_owned()),
        rate => Ok(rate),
    }
}

fn parse_link_rate(text: &str) -> Result<u64, String> {
    let rate = parse_bit_rate(text).map_err(|error| error.to_string())?;
    match rate {
        0 => Err("a rate is more than 0".to_owned()),
        rate => Ok(rate),
    }
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The parcel's name
    pub(crate) name: String,
    /// The site that it goes to
    #[arg(long, value_name = "SITE")]
    pub(crate) to: String,
    /// How many devices may be lost on the way
    #[arg(
        long,
        default_value_t = 0,
        value_name = "NUMBER",
        value_parser = clap::value_parser!(u8).range(0..=2)
    )]
    pub(crate) lose: u8,
}

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The parcel's name
    pub(crate) name: String,
    /// The site that it goes to: make the parcel first, and add the guests
    #[arg(long, value_name = "SITE", requires = "guests")]
    pub(crate) to: Option<String>,
    /// A device: a folder on a disk that is to be shipped, an empty block device, or HOST:NAME for
    /// a device that is attached to another host, whose configuration names it under
    /// [parcel_devices]. Later, where a device is now, if that has changed
    #[arg(long = "device", value_name = "DEVICE")]
    pub(crate) devices: Vec<PathBuf>,
    /// How many devices may be lost on the way
    #[arg(
        long,
        default_value_t = 0,
        value_name = "NUMBER",
        requires = "guests",
        value_parser = clap::value_parser!(u8).range(0..=2)
    )]
    pub(crate) lose: u8,
    /// How much to use of each device [default: all that is free]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "devices")]
    pub(crate) limit: Option<u64>,
    /// Do not freeze guests' file systems, also if their agents could do that
    #[arg(long)]
    pub(crate) no_freeze: bool,
    /// With --to: guests, and the names of their images in the configuration
    #[arg(value_name = "GUEST=IMAGE,...", requires_all = ["to", "devices"])]
    pub(crate) guests: Vec<ParcelGuest>,
}

#[derive(Debug, Args)]
pub(crate) struct ShipArgs {
    /// The parcel's name
    pub(crate) name: String,
    /// Who carries the devices
    #[arg(long, value_name = "TEXT", required_unless_present = "cancel")]
    pub(crate) courier: Option<String>,
    /// The courier's number for them
    #[arg(long, value_name = "TEXT", required_unless_present = "cancel")]
    pub(crate) number: Option<String>,
    /// When they leave [default: today, in UTC]
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub(crate) date: Option<Date>,
    /// When they are expected to arrive
    #[arg(long, value_name = "YYYY-MM-DD")]
    pub(crate) arrives: Option<Date>,
    /// Take the note back: the devices are here
    #[arg(long, conflicts_with_all = ["courier", "number", "date", "arrives"])]
    pub(crate) cancel: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ParcelImportArgs {
    /// A file with the parcel's key; `-` reads it from standard input
    #[arg(long, value_name = "FILE")]
    pub(crate) key_file: PathBuf,
    /// The last version of each guest up to this one [default: the last one]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) version: Option<u64>,
    /// Write the images to a folder, under their names, instead of where a move finds them
    #[arg(long, value_name = "FOLDER")]
    pub(crate) into: Option<PathBuf>,
    /// Its devices: folders, files, block devices, or HOST:NAME at another host
    #[arg(required = true, value_name = "DEVICE")]
    pub(crate) devices: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ComparedArgs {
    /// A parcel: its guests' images count, with what they have allocated
    #[arg(conflicts_with_all = ["bytes", "guests"])]
    pub(crate) name: Option<String>,
    /// How much all disks have
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) bytes: Option<u64>,
    /// How many guests have them
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000)
    )]
    pub(crate) guests: u64,
    /// The rate of the link
    #[arg(long, value_name = "RATE", value_parser = parse_link_rate)]
    pub(crate) rate: u64,
    /// How much of the disks differs from one day to the next: a size, or a part such as 2%
    #[arg(long, value_name = "SIZE|PERCENT")]
    pub(crate) changed_per_day: Changes,
    /// Days that the courier takes
    #[arg(long, value_name = "DAYS", value_parser = parse_days)]
    pub(crate) courier_days: f64,
    /// Days from now until the courier comes; the export begins now
    #[arg(long, value_name = "DAYS", default_value = "0", value_parser = parse_days)]
    pub(crate) leaves_in: f64,
    /// What the courier costs
    #[arg(long, value_name = "COST", default_value = "0", value_parser = parse_cost)]
    pub(crate) courier_cost: f64,
    /// What 1,000,000,000 bytes over the link cost
    #[arg(long, value_name = "COST", default_value = "0", value_parser = parse_cost)]
    pub(crate) link_cost_per_gb: f64,
    /// How much the devices take in a second, all together
    #[arg(long, value_name = "SIZE", default_value = "150MiB", value_parser = parse_rate)]
    pub(crate) device_rate: u64,
    /// How much is read of the guests' disks in a second
    #[arg(long, value_name = "SIZE", default_value = "500MiB", value_parser = parse_rate)]
    pub(crate) disk_rate: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ParcelCommand {
    /// Make a parcel and draw its key; nothing is written to devices
    Create(CreateArgs),
    /// Add guests to a parcel, also after it was sealed: the next top-up then writes them in full
    Add {
        /// The parcel's name
        name: String,
        /// Guests, and the names of their images in the configuration
        #[arg(required = true, value_name = "GUEST=IMAGE,...")]
        guests: Vec<ParcelGuest>,
        /// Put them into a group: its guests have the same moment, if all of them run here
        #[arg(long, value_name = "NAME")]
        group: Option<String>,
    },
    /// Write guests' disks to devices, read everything back, and seal the parcel; an export that
    /// was interrupted goes on. The guests may go on running
    Export(ExportArgs),
    /// Export what has changed since the parcel was sealed, and seal it again
    TopUp {
        /// The parcel's name
        name: String,
        /// Do not freeze guests' file systems, also if their agents could do that
        #[arg(long)]
        no_freeze: bool,
    },
    /// Note who carries the devices of a sealed parcel, or take the note back
    Ship(ShipArgs),
    /// List the parcels of this host, or show what one has done and what it will do next
    Status {
        /// The parcel's name
        name: Option<String>,
    },
    /// Compare the report of an import with what was exported. Exit code 1 if any disk differs
    Check {
        /// The parcel's name
        name: String,
        /// The report that the import has written
        report: PathBuf,
    },
    /// Compare moving disks over the link with a parcel, and with one that is topped up: dates,
    /// bytes, costs
    Plan(ComparedArgs),
    /// Print a parcel's key, for the destination: send it another way than the devices, for example
    /// encrypted with age
    Key {
        /// The parcel's name
        name: String,
    },
    /// Bring the disks of a parcel to this host, as content that a move of their guests finds
    Import(ParcelImportArgs),
    /// Read all of a parcel, and say what is missing or damaged, and whether it can be recovered;
    /// no key is needed
    Verify {
        /// Its devices: folders, files, block devices, or HOST:NAME at another host
        #[arg(required = true, value_name = "DEVICE")]
        devices: Vec<PathBuf>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_a_size_or_a_part() {
        assert_eq!("20GiB".parse(), Ok(Changes::Bytes(20 << 30)));
        assert_eq!("2.5%".parse(), Ok(Changes::Part(0.025)));
        for text in ["", "%", "-1%", "101%", "NaN%", "2 days"] {
            assert!(text.parse::<Changes>().is_err(), "{text}");
        }
        for text in ["-1", "NaN", "inf", "3651", "two"] {
            assert!(parse_days(text).is_err(), "{text}");
        }
        assert_eq!(parse_days("0.5"), Ok(0.5));
        assert!(parse_cost("-1").is_err() && parse_rate("0").is_err());
        assert!(parse_link_rate("0bit").is_err());
    }
}
