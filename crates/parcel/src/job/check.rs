//! Compares what the destination reports with what was exported.

use super::Job;
use super::document::{Confirmation, SealedDisk};
use super::error::JobError;
use crate::report::ImportReport;
use crate::report::SignedReport;
use serde::Serialize;

/// How a disk at the destination compares with the last sealed version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "is")]
pub enum Verdict {
    /// It is what was exported.
    Equal,
    /// It is what an earlier version has.
    Older {
        /// The version.
        version: u64,
    },
    /// No version has it so.
    Unknown,
    /// It was exported, and the report does not name it.
    Missing,
}

/// A disk with its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckedDisk {
    /// The guest's name.
    pub guest: String,
    /// The disk's name.
    pub disk: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// What it is.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// A report with its verdicts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// The last sealed version.
    pub version: u64,
    /// What the destination says.
    pub report: ImportReport,
    /// All disks of the report, and those that it lacks.
    pub disks: Vec<CheckedDisk>,
    /// Whether all are equal.
    pub confirmed: bool,
}

impl Job {
    /// Compares a report with the last sealed version. If all disks are equal, the job notes that
    /// the destination has them.
    ///
    /// # Errors
    /// When the report is not one of this parcel, or the parcel was never sealed.
    pub fn check(&mut self, report: &SignedReport, now: u64) -> Result<Checked, JobError> {
        let _lock = self.lock()?;
        let ImportReport { parcel, name, .. } = &report.report;
        let (parcel, name) = (*parcel, name.clone());
        let is_known = self
            .copier
            .document
            .parcel
            .is_none_or(|known| known == parcel);
        if !is_known || !report.is_by(&self.key)? || name != self.copier.document.name {
            return Err(JobError::OtherReport {
                parcel: self.copier.document.name.clone(),
                name,
                id: parcel,
            });
        }
        let not_sealed = || JobError::NotSealed(self.copier.document.name.clone());
        let (version, last, earlier) = match self.copier.document.seals.split_last() {
            Some((last, earlier)) => (last.version, last.disks.clone(), earlier),
            // An earlier program has sealed it, and kept no list.
            None if self.copier.document.sealed => {
                (self.copier.state.version, self.exported_disks()?, &[][..])
            }
            None => return Err(not_sealed()),
        };
        let report = report.report.clone();
        let mut disks: Vec<CheckedDisk> = Vec::new();
        for here in &report.disks {
            let is_it = |disk: &&SealedDisk| disk.guest == here.guest && disk.disk == here.disk;
            let has = |disks: &[SealedDisk]| {
                let disk = disks.iter().find(is_it);
                disk.is_some_and(|disk| disk.bytes == here.bytes && disk.digest == here.digest)
            };
            let verdict = match has(&last) {
                true => Verdict::Equal,
                false => {
                    let older = earlier.iter().rev().find(|seal| has(&seal.disks));
                    older.map_or(Verdict::Unknown, |seal| Verdict::Older {
                        version: seal.version,
                    })
                }
            };
            disks.push(CheckedDisk {
                guest: here.guest.clone(),
                disk: here.disk.clone(),
                bytes: here.bytes,
                verdict,
            });
        }
        let lacks = |disk: &&SealedDisk| {
            let mut disks = report.disks.iter();
            disks.all(|here| (&here.guest, &here.disk) != (&disk.guest, &disk.disk))
        };
        disks.extend(last.iter().filter(lacks).map(|disk| CheckedDisk {
            guest: disk.guest.clone(),
            disk: disk.disk.clone(),
            bytes: disk.bytes,
            verdict: Verdict::Missing,
        }));
        let confirmed = disks.iter().all(|disk| disk.verdict == Verdict::Equal);
        if confirmed {
            self.copier.document.confirmed = Some(Confirmation {
                version,
                imported: report.imported,
                checked: now,
            });
            self.copier.save()?;
        }
        Ok(Checked {
            version,
            report,
            disks,
            confirmed,
        })
    }
}
