//! The reader of a parcel.

use crate::bisect::PROBES;
use crate::cell::{Cell, Kind, Name};
use crate::device::Device;
use crate::header::{Header, HeaderError, ParcelId, Proof};
use crate::key::{DataKey, Fingerprint, KeyError};
use crate::layout::{Layout, LayoutError};
use crate::log::{LogFault, LogReader};
use crate::record::{Record, RecordError};
use crate::row::{self, Generation, Missing, Row};
use std::convert::Infallible;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

/// The most damaged cells that a report lists for a device.
const LISTED_MAX: usize = 100;

/// Why devices cannot be opened as a parcel.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// None of them has a valid header.
    #[error("none of these devices has a header of a parcel")]
    NoHeader,
    /// They belong to different parcels.
    #[error(
        "{} belongs to parcel {found}, and the others to {expected}: give the devices of one",
        path.display()
    )]
    Mixed {
        /// One of them.
        path: PathBuf,
        /// Its parcel.
        found: String,
        /// That of the others.
        expected: String,
    },
    /// Two are copies of one device.
    #[error("{} and {} are both device {device}", first.display(), second.display())]
    Twice {
        /// Its number.
        device: u16,
        /// The first one.
        first: PathBuf,
        /// The second one.
        second: PathBuf,
    },
    /// It was continued separately from the others.
    #[error(
        "{} belongs to the same parcel as the others, but was written separately from them: give \
         devices that were sealed together",
        .0.display()
    )]
    Forked(PathBuf),
    /// The parcel was not sealed, or no device with the last header is there.
    #[error(
        "parcel {0} is not sealed: seal it at the source, or give the devices that are missing (a \
         device that was full early does not have the last header)"
    )]
    Unsealed(String),
    /// A header contradicts the format.
    #[error("{}: {error}", path.display())]
    Header {
        /// The device.
        path: PathBuf,
        /// What is wrong.
        #[source]
        error: HeaderError,
    },
    /// A device cannot be read.
    #[error("{}: {error}", path.display())]
    Io {
        /// The device.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
}

/// Why a parcel cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The key is that of another parcel.
    #[error("this key has the fingerprint {given}, and the parcel needs {needed}")]
    Key {
        /// The key's.
        given: Fingerprint,
        /// The parcel's.
        needed: Fingerprint,
    },
    /// The key cannot be used.
    #[error(transparent)]
    Refused(#[from] KeyError),
    /// A cell is as it was written, and was not encrypted with this key.
    #[error("the cell of row {row} on device {device} is not authentic: the parcel was altered")]
    Altered {
        /// Its row.
        row: u64,
        /// Its device.
        device: usize,
    },
    /// The last header was not written with this key.
    #[error("the last header is not authentic: the parcel was altered")]
    AlteredHeader,
    /// The log contradicts the format.
    #[error(transparent)]
    Log(#[from] LogFault),
    /// A record contradicts the format.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The layout contradicts the format.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// What uses the records has failed.
    #[error("{0}")]
    User(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The damage of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// It is not there.
    Absent,
    /// Cells of it are damaged or cannot be read.
    Cells {
        /// How many.
        cells: u64,
        /// The rows of the first of them.
        rows: Vec<u64>,
        /// What the system said of the last one that could not be read.
        error: Option<String>,
    },
}

/// What was found on the devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Rows read.
    pub rows: u64,
    /// Data cells that were missing and were recovered from parity.
    pub recovered: u64,
    /// Data cells that are lost.
    pub lost: u64,
    /// The damage of each device that has any, by its number.
    pub damage: Vec<(usize, Damage)>,
}

impl Report {
    /// Returns whether nothing at all is wrong.
    pub fn is_clean(&self) -> bool {
        self.damage.is_empty() && self.lost == 0
    }

    fn note(&mut self, row: &Row, at: u64) {
        self.rows += 1;
        let lost = row.data.iter().filter(|cell| cell.is_none()).count() as u64;
        self.lost += lost;
        self.note_missing(&row.missing, at);
    }

    fn note_missing(&mut self, missing: &[(usize, Missing)], at: u64) {
        for (device, missing) in missing {
            let known = self.damage.iter().position(|(number, _)| number == device);
            let index = known.unwrap_or_else(|| {
                let none = Damage::Cells {
                    cells: 0,
                    rows: Vec::new(),
                    error: None,
                };
                self.damage.push((*device, none));
                self.damage.len() - 1
            });
            let Some((_, damage)) = self.damage.get_mut(index) else {
                continue;
            };
            match (missing, damage) {
                (Missing::Device, damage) => *damage = Damage::Absent,
                (_, Damage::Absent) => {}
                (missing, Damage::Cells { cells, rows, error }) => {
                    *cells += 1;
                    if rows.len() < LISTED_MAX {
                        rows.push(at);
                    }
                    if let Missing::Unreadable(said) = missing {
                        *error = Some(said.clone());
                    }
                }
            }
        }
    }
}

/// A sealed parcel, as far as its devices are there.
#[derive(Debug)]
pub struct Parcel {
    devices: Vec<Option<Device>>,
    header: Header,
    /// `None` if this program has made the header.
    proof: Option<Proof>,
    generations: Vec<Generation>,
}

/// Returns the generations that a header tells of, without its own.
pub(crate) fn earlier(header: &Header) -> Result<Vec<Generation>, LayoutError> {
    let each = header.earlier.iter();
    each.map(|earlier| {
        Ok(Generation {
            number: earlier.generation,
            nonce: earlier.nonce,
            layout: Layout::new(&earlier.devices, header.parity)?,
            rows: earlier.first + 1..earlier.end,
        })
    })
    .collect()
}

/// Reads the header in a row of a device, if one is there.
pub(crate) fn header_at(device: &Device, row: u64) -> Result<Option<(Header, Proof)>, OpenError> {
    let path = || device.path().to_path_buf();
    let mut cell = Cell::new();
    let read = device.read(row, &mut cell);
    let is_there = read.map_err(|error| OpenError::Io {
        path: path(),
        error,
    })?;
    let name = cell
        .name()
        .filter(|name| is_there && name.kind == Kind::Header);
    let Some(name) = name.filter(|name| name.row == row) else {
        return Ok(None);
    };
    let header = Header::decode(&name, cell.body());
    header.map(Some).map_err(|error| OpenError::Header {
        path: path(),
        error,
    })
}

/// A device that is recognised.
struct Recognised {
    device: Device,
    number: u16,
    /// The first bytes of the parcel's id.
    parcel: [u8; 8],
    header: Option<(Header, Proof)>,
}

/// Recognises a device by the header in its last cell if that is one, otherwise by the first
/// header, otherwise by any valid cell at its beginning or end.
fn recognise(device: Device) -> Result<Option<Recognised>, OpenError> {
    // A device of which nothing can be read is absent, not the end of everything.
    let Ok(written) = device.readable() else {
        return Ok(None);
    };
    let last = match written.checked_sub(1) {
        Some(last) => header_at(&device, last).unwrap_or(None),
        None => None,
    };
    let header = match last {
        Some(found) => Some(found),
        None => match header_at(&device, 0) {
            Err(OpenError::Io { .. }) => None,
            read => read?,
        },
    };
    if let Some((its, proof)) = header {
        return Ok(Some(Recognised {
            device,
            number: its.device,
            parcel: its.parcel.short(),
            header: Some((its, proof)),
        }));
    }
    let mut cell = Cell::new();
    let ends = written.saturating_sub(PROBES)..written;
    for row in (0..written.min(PROBES)).chain(ends) {
        let is_there = device.read(row, &mut cell).unwrap_or(false);
        let name = cell.name().filter(|name| is_there && name.row == row);
        if let Some(Name {
            device: number,
            parcel,
            ..
        }) = name
        {
            return Ok(Some(Recognised {
                device,
                number,
                parcel,
                header: None,
            }));
        }
    }
    Ok(None)
}

/// Returns whether a header is of the same history as the last one. Where it was continued twice
/// from one state, earlier generations of one number have different nonces. Those of the headers
/// themselves may differ: a power cut may have taken one before anything followed it, and then its
/// number is used again.
fn is_of(its: &Header, last: &Header) -> bool {
    its.earlier.iter().all(|its| {
        let mut same = last.earlier.iter();
        let same = same.find(|it| it.generation == its.generation);
        same.is_none_or(|it| it.nonce == its.nonce)
    })
}

impl Parcel {
    /// Opens the devices of a sealed parcel, in any order. Some may be missing.
    ///
    /// # Errors
    /// When they do not belong together, or the parcel is not sealed.
    pub fn open(devices: Vec<Device>) -> Result<Self, OpenError> {
        let mut found = Vec::new();
        for device in devices {
            // What has no valid cell counts as missing.
            found.extend(recognise(device)?);
        }
        let headers = found.iter().filter_map(|it| it.header.as_ref());
        let latest = headers.max_by_key(|(header, _)| (header.generation, header.sealed));
        let (header, proof) = latest.cloned().ok_or(OpenError::NoHeader)?;
        let mut places: Vec<Option<Device>> = Vec::new();
        places.resize_with(header.devices.len(), || None);
        for its in found {
            let path = its.device.path().to_path_buf();
            let header_of_it = its.header.as_ref().map(|(its, _)| its);
            if header_of_it.is_some_and(|its| its.parcel == header.parcel && !is_of(its, &header)) {
                return Err(OpenError::Forked(path));
            }
            let other = its
                .header
                .filter(|(other, _)| other.parcel != header.parcel);
            if its.parcel != header.parcel.short() || other.is_some() {
                let digits = |id: &[u8]| id.iter().map(|byte| format!("{byte:02x}")).collect();
                return Err(OpenError::Mixed {
                    path,
                    found: match other {
                        Some((other, _)) => format!("{} ({})", other.name, other.parcel),
                        None => digits(&its.parcel),
                    },
                    expected: format!("{} ({})", header.name, header.parcel),
                });
            }
            let Some(place) = places.get_mut(usize::from(its.number)) else {
                continue;
            };
            if let Some(first) = place {
                return Err(OpenError::Twice {
                    device: its.number,
                    first: first.path().to_path_buf(),
                    second: path,
                });
            }
            *place = Some(its.device);
        }
        if !header.sealed {
            return Err(OpenError::Unsealed(header.name));
        }
        let generations = earlier(&header).map_err(|error| OpenError::Header {
            path: PathBuf::from(&header.name),
            error: error.into(),
        })?;
        Ok(Self {
            devices: places,
            header,
            proof: Some(proof),
            generations,
        })
    }

    /// Creates a parcel of all its devices, with its last header.
    pub(crate) fn of(devices: Vec<Device>, header: Header) -> Result<Self, LayoutError> {
        Ok(Self {
            devices: devices.into_iter().map(Some).collect(),
            generations: earlier(&header)?,
            header,
            proof: None,
        })
    }

    /// Returns the devices that are there.
    pub(crate) fn into_devices(self) -> Vec<Device> {
        self.devices.into_iter().flatten().collect()
    }

    /// Returns its last header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns a device, if it is there.
    pub fn device(&self, number: usize) -> Option<&Device> {
        self.devices.get(number).and_then(Option::as_ref)
    }

    /// Returns its id.
    pub fn id(&self) -> ParcelId {
        self.header.parcel
    }

    /// Returns the number of rows, without those of headers.
    pub fn rows(&self) -> u64 {
        let each = self.generations.iter();
        let each = each.map(|it| it.rows.end - it.rows.start);
        each.sum()
    }

    /// Reads everything, without a key. `progress` is called with the number of rows read.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Report {
        let mut report = self.verify_rows(progress);
        self.verify_header(&mut report);
        report
    }

    /// Reads the last header from all devices that take part in its row. One is enough to read the
    /// parcel.
    pub(crate) fn verify_header(&self, report: &mut Report) {
        let Ok(layout) = self.header.layout() else {
            return;
        };
        let row = self.header.row;
        let read = |number: usize| {
            let name = Header {
                device: number as u16,
                ..self.header.clone()
            };
            let cell = row::read_cell(self.device(number), &name.cell_name());
            cell.err().map(|missing| (number, missing))
        };
        let missing: Vec<_> = layout.devices(row).into_iter().filter_map(read).collect();
        report.note_missing(&missing, row);
    }

    /// Reads all rows but those of headers.
    pub(crate) fn verify_rows(&self, progress: &mut dyn FnMut(u64)) -> Report {
        let mut report = Report::default();
        for generation in &self.generations {
            verify(&self.devices, &self.header.parcel, generation, |row, at| {
                report.note(row, at);
                progress(report.rows);
            });
        }
        report
    }

    /// Reads all records in their order. Records that cannot be recovered are left out; the report
    /// says how much is lost.
    ///
    /// # Errors
    /// When the key is another one, the parcel contradicts its format, or `each` fails.
    pub fn read<E>(
        &self,
        key: &DataKey,
        mut each: impl FnMut(Record) -> Result<(), E>,
    ) -> Result<Report, ReadError>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (given, needed) = (key.fingerprint()?, self.header.key);
        if given != needed {
            return Err(ReadError::Key { given, needed });
        }
        let headers = key.of_headers(&self.header.parcel)?;
        if self
            .proof
            .as_ref()
            .is_some_and(|proof| !proof.is_by(&headers))
        {
            return Err(ReadError::AlteredHeader);
        }
        let mut report = Report::default();
        for generation in &self.generations {
            let count = u16::try_from(self.devices.len()).unwrap_or(u16::MAX);
            let keys = (0..count)
                .map(|device| key.of_cells(&self.header.parcel, &generation.nonce, device))
                .collect::<Result<Vec<_>, _>>()?;
            let mut log = LogReader::default();
            let parcel = &self.header.parcel;
            each_row(&self.devices, parcel, generation, |mut row, at| {
                let Some(roles) = generation.layout.roles(at) else {
                    return Ok(());
                };
                report.note(&row, at);
                let was = |device: &usize| row.missing.iter().any(|(it, _)| it == device);
                let missing: Vec<bool> = roles.data.iter().map(was).collect();
                for ((cell, device), was) in row.data.iter_mut().zip(&roles.data).zip(missing) {
                    let Some(cell) = cell else {
                        log.skip();
                        continue;
                    };
                    report.recovered += u64::from(was);
                    let name =
                        row::name(&self.header.parcel, generation, (at, *device), Kind::Data);
                    let opened = keys.get(*device).and_then(|key| {
                        let body = cell.body_mut();
                        key.open(&name, body)
                    });
                    let plain = opened.ok_or(ReadError::Altered {
                        row: at,
                        device: *device,
                    })?;
                    log.read(plain, |kind, rest| {
                        let record = Record::decode(kind, rest)?;
                        each(record).map_err(|error| ReadError::User(error.into()))
                    })?;
                }
                Ok::<_, ReadError>(())
            })?;
        }
        Ok(report)
    }
}

/// Verifies all rows of a generation.
pub(crate) fn verify(
    devices: &[Option<Device>],
    parcel: &ParcelId,
    generation: &Generation,
    mut each: impl FnMut(&Row, u64),
) {
    let all: Result<(), Infallible> = each_row(devices, parcel, generation, |row, at| {
        each(&row, at);
        Ok(())
    });
    match all {
        Ok(()) => {}
    }
}

/// Reads all rows of a generation, each one while that before it is verified and used.
fn each_row<E>(
    devices: &[Option<Device>],
    parcel: &ParcelId,
    generation: &Generation,
    mut each: impl FnMut(Row, u64) -> Result<(), E>,
) -> Result<(), E> {
    thread::scope(|scope| {
        let (sender, rows) = mpsc::sync_channel(0);
        scope.spawn(move || {
            for at in generation.rows.clone() {
                let fetched = row::fetch(devices, parcel, generation, at);
                // Nobody receives it after an error.
                if fetched.is_some_and(|fetched| sender.send((at, fetched)).is_err()) {
                    return;
                }
            }
        });
        for (at, fetched) in rows {
            each(fetched.verify(parcel, generation), at)?;
        }
        Ok(())
    })
}
