//! The report of an import: what the destination has, for the source to compare before it deletes
//! anything.

use crate::header::ParcelId;
use crate::import::ImportedDisk;
use crate::key::{DataKey, Fingerprint, KeyError};
use crate::reader::{Damage, Parcel, Report};
use crate::tree::text;
use ring::hmac;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The most bytes of a report.
pub const REPORT_BYTES_MAX: u64 = 16 << 20;
/// The only version of the document.
const FORMAT: u32 = 1;
const PROOF: &str = "proof";

/// Why a report cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// It is longer than a report can be.
    #[error("a report has at most {REPORT_BYTES_MAX} bytes")]
    Long,
    /// It is not JSON of the format.
    #[error("it is not the report of an import: {0}")]
    Json(#[from] serde_json::Error),
    /// It is of a later program.
    #[error("it has the format {0}, and this program knows {FORMAT}")]
    Format(u32),
    /// It has no proof.
    #[error("it has no proof, so it is not the report of an import")]
    NoProof,
    /// The key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
}

/// A disk as it was imported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedDisk {
    /// The guest's name.
    pub guest: String,
    /// The disk's name.
    pub disk: String,
    /// Its version.
    pub version: u64,
    /// When the version was exported, in seconds since 1970.
    pub time: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// The digest of its content, read back from the file, in hexadecimal digits.
    pub digest: String,
    /// Its file at the destination.
    pub path: String,
}

/// The state of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// All that was read of it is as it was written.
    Good,
    /// Some of its cells are damaged.
    Damaged,
    /// It was not there.
    Missing,
}

/// A device as it arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedDevice {
    /// Its number.
    pub device: usize,
    /// Its state.
    pub state: DeviceState,
    /// How many of its cells are damaged.
    pub damaged_cells: u64,
}

/// What an import has brought.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportReport {
    /// The version of this document, 1.
    pub format: u32,
    /// The id of the parcel.
    pub parcel: ParcelId,
    /// Its name.
    pub name: String,
    /// The site that it was sent to.
    pub to: String,
    /// The fingerprint of its data key.
    pub key: Fingerprint,
    /// When it was imported, in seconds since 1970.
    pub imported: u64,
    /// The disks.
    pub disks: Vec<ReportedDisk>,
    /// Cells that were recovered from parity.
    pub recovered_cells: u64,
    /// The devices.
    pub devices: Vec<ReportedDevice>,
}

/// A report with its proof.
#[derive(Debug, Clone)]
pub struct SignedReport {
    /// What it says.
    pub report: ImportReport,
    /// What the proof is of.
    signed: Vec<u8>,
    tag: Vec<u8>,
}

/// Returns the bytes of a document that its proof is of: without blanks, and keys in their order.
fn canonical(document: &Value) -> Result<Vec<u8>, ReportError> {
    // The keys of an object of `serde_json` are sorted.
    Ok(serde_json::to_vec(document)?)
}

impl ImportReport {
    /// Makes the report of an import. `now` is in seconds since 1970.
    pub fn of(parcel: &Parcel, (disks, read): (&[ImportedDisk], &Report), now: u64) -> Self {
        let header = parcel.header();
        let disks = disks.iter().map(|it| ReportedDisk {
            guest: it.guest.clone(),
            disk: it.disk.clone(),
            version: it.version,
            time: it.time,
            bytes: it.bytes,
            digest: it.digest.clone(),
            path: it.path.display().to_string(),
        });
        let devices = (0..header.devices.len()).map(|device| {
            let mut damage = read.damage.iter();
            let damage = damage.find(|(number, _)| *number == device);
            let (state, damaged_cells) = match (parcel.device(device), damage) {
                (None, _) | (_, Some((_, Damage::Absent))) => (DeviceState::Missing, 0),
                (Some(_), Some((_, Damage::Cells { cells, .. }))) => (DeviceState::Damaged, *cells),
                (Some(_), None) => (DeviceState::Good, 0),
            };
            ReportedDevice {
                device,
                state,
                damaged_cells,
            }
        });
        Self {
            format: FORMAT,
            parcel: parcel.id(),
            name: header.name.clone(),
            to: header.to.clone(),
            key: header.key,
            imported: now,
            disks: disks.collect(),
            recovered_cells: read.recovered,
            devices: devices.collect(),
        }
    }

    /// Returns the document with the proof that it was made with the key.
    ///
    /// # Errors
    /// When the key cannot be used, or the report is too long.
    pub fn sign(&self, key: &DataKey) -> Result<Vec<u8>, ReportError> {
        let mut document = serde_json::to_value(self)?;
        let tag = hmac::sign(&key.of_reports(&self.parcel)?, &canonical(&document)?);
        if let Some(keys) = document.as_object_mut() {
            keys.insert(PROOF.to_owned(), Value::String(text(tag.as_ref())));
        }
        let mut bytes = serde_json::to_vec_pretty(&document)?;
        bytes.push(b'\n');
        match bytes.len() as u64 > REPORT_BYTES_MAX {
            true => Err(ReportError::Long),
            false => Ok(bytes),
        }
    }
}

impl SignedReport {
    /// Reads a report. Nothing that it says counts before [`is_by`](Self::is_by) was asked.
    ///
    /// # Errors
    /// When it is not one.
    pub fn read(bytes: &[u8]) -> Result<Self, ReportError> {
        if bytes.len() as u64 > REPORT_BYTES_MAX {
            return Err(ReportError::Long);
        }
        let mut document: Value = serde_json::from_slice(bytes)?;
        let proof = document.as_object_mut().and_then(|it| it.remove(PROOF));
        let proof = proof.as_ref().and_then(Value::as_str);
        let tag = proof.and_then(bytes_of).ok_or(ReportError::NoProof)?;
        let signed = canonical(&document)?;
        let report: ImportReport = serde_json::from_value(document)?;
        match report.format {
            FORMAT => Ok(Self {
                report,
                signed,
                tag,
            }),
            other => Err(ReportError::Format(other)),
        }
    }

    /// Returns whether someone has made it who has this key.
    ///
    /// # Errors
    /// When the key cannot be used.
    pub fn is_by(&self, key: &DataKey) -> Result<bool, KeyError> {
        let reports = key.of_reports(&self.report.parcel)?;
        Ok(hmac::verify(&reports, &self.signed, &self.tag).is_ok())
    }
}

/// Returns the bytes of 64 hexadecimal digits.
fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    let is_digit = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
    if digits.len() != 64 || !digits.bytes().all(is_digit) {
        return None;
    }
    let (pairs, _) = digits.as_bytes().as_chunks::<2>();
    let digit = |c: u8| (c as char).to_digit(16).unwrap_or(0) as u8;
    Some(
        pairs
            .iter()
            .map(|[high, low]| digit(*high) << 4 | digit(*low))
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::Bytes16;
    use proptest::prelude::*;

    fn report(key: &DataKey) -> ImportReport {
        ImportReport {
            format: FORMAT,
            parcel: ParcelId(Bytes16([3; 16])),
            name: "box".into(),
            to: "paris".into(),
            key: key.fingerprint().unwrap(),
            imported: 1_800_000_000,
            disks: vec![ReportedDisk {
                guest: "wéb \"7\"".into(),
                disk: "root".into(),
                version: 2,
                time: 1_700_000_000,
                bytes: 5000,
                digest: "00".repeat(32),
                path: "/var/lib/web.raw.moved".into(),
            }],
            recovered_cells: 4,
            devices: vec![ReportedDevice {
                device: 0,
                state: DeviceState::Damaged,
                damaged_cells: 4,
            }],
        }
    }

    #[test]
    fn a_report_is_proved_by_its_key_alone() {
        let (key, other) = (DataKey::from_bytes([1; 32]), DataKey::from_bytes([2; 32]));
        let report = report(&key);
        let file = report.sign(&key).unwrap();
        let read = SignedReport::read(&file).unwrap();
        assert_eq!(read.report, report);
        assert!(read.is_by(&key).unwrap());
        assert!(!read.is_by(&other).unwrap());
        // Blanks, and keys of later programs, do not matter, but each value does.
        let mut value: Value = serde_json::from_slice(&file).unwrap();
        let compact = serde_json::to_vec(&value).unwrap();
        assert!(SignedReport::read(&compact).unwrap().is_by(&key).unwrap());
        for (at, new) in [
            ("/disks/0/digest", Value::from("11".repeat(32))),
            ("/disks/0/bytes", Value::from(5001)),
            ("/disks/0/guest", Value::from("web")),
            ("/imported", Value::from(1)),
            ("/recovered_cells", Value::from(0)),
            ("/devices/0/state", Value::from("good")),
            ("/parcel", Value::from("04".repeat(16))),
        ] {
            let old = std::mem::replace(value.pointer_mut(at).unwrap(), new);
            let altered = serde_json::to_vec(&value).unwrap();
            let altered = SignedReport::read(&altered).unwrap();
            assert!(!altered.is_by(&key).unwrap(), "{at}");
            *value.pointer_mut(at).unwrap() = old;
        }
        value["more"] = Value::from("said later");
        let more = serde_json::to_vec(&value).unwrap();
        assert!(!SignedReport::read(&more).unwrap().is_by(&key).unwrap());
    }

    proptest! {
        #[test]
        fn a_changed_byte_is_refused_or_changes_nothing(at in any::<usize>(), byte: u8) {
            let key = DataKey::from_bytes([1; 32]);
            let report = report(&key);
            let mut file = report.sign(&key).unwrap();
            let at = at % file.len();
            file[at] = byte;
            if let Ok(read) = SignedReport::read(&file) {
                prop_assert!(!read.is_by(&key).unwrap() || read.report == report);
            }
        }
    }

    #[test]
    fn what_is_no_report_is_refused() {
        let key = DataKey::from_bytes([1; 32]);
        let file = report(&key).sign(&key).unwrap();
        let mut value: Value = serde_json::from_slice(&file).unwrap();
        let read = |value: &Value| SignedReport::read(&serde_json::to_vec(value).unwrap());
        value["format"] = Value::from(2);
        assert!(matches!(read(&value), Err(ReportError::Format(2))));
        value["format"] = Value::from(1);
        for proof in [Value::Null, Value::from("00"), Value::from("G".repeat(64))] {
            value["proof"] = proof;
            assert!(matches!(read(&value), Err(ReportError::NoProof)));
        }
        value["proof"] = Value::from("00".repeat(32));
        value["disks"] = Value::from(1);
        assert!(matches!(read(&value), Err(ReportError::Json(_))));
        for bytes in [&b""[..], b"[]", b"null", b"{", &file[..file.len() / 2]] {
            assert!(SignedReport::read(bytes).is_err());
        }
        let long = vec![b' '; REPORT_BYTES_MAX as usize + 1];
        assert!(matches!(SignedReport::read(&long), Err(ReportError::Long)));
    }
}
