//! The arguments of parcels.

use clap::{Args, Subcommand};
use longhaul_protocol::units::parse_bytes;
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

#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The parcel's name
    pub(crate) name: String,
    /// The site that it goes to
    #[arg(long, value_name = "SITE", requires = "guests")]
    pub(crate) to: Option<String>,
    /// A device: a folder on a disk that is to be shipped, or an empty block device
    #[arg(long = "device", value_name = "DEVICE", requires = "guests")]
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
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, requires = "guests")]
    pub(crate) limit: Option<u64>,
    /// Guests, and the names of their images in the configuration. Without any, an export that was
    /// interrupted goes on
    #[arg(value_name = "GUEST=IMAGE,...", requires_all = ["to", "devices"])]
    pub(crate) guests: Vec<ParcelGuest>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ParcelCommand {
    /// Write guests' disks to devices, read everything back, and seal the parcel. The guests may go
    /// on running
    Export(ExportArgs),
    /// Export what has changed since the parcel was sealed, and seal it again
    TopUp {
        /// The parcel's name
        name: String,
    },
    /// Print a parcel's key, for the destination: send it another way than the devices, for example
    /// encrypted with age
    Key {
        /// The parcel's name
        name: String,
    },
    /// Bring the disks of a parcel to this host, as content that a move of their guests finds
    Import {
        /// A file with the parcel's key; `-` reads it from standard input
        #[arg(long, value_name = "FILE")]
        key_file: PathBuf,
        /// Its devices: folders, files, or block devices
        #[arg(required = true, value_name = "DEVICE")]
        devices: Vec<PathBuf>,
    },
    /// Read all of a parcel, and say what is missing or damaged, and whether it can be recovered;
    /// no key is needed
    Verify {
        /// Its devices: folders, files, or block devices
        #[arg(required = true, value_name = "DEVICE")]
        devices: Vec<PathBuf>,
    },
}
