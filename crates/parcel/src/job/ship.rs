//! The journey of a parcel's devices, as the operator notes it.

use super::Job;
use super::document::Shipment;
use super::error::JobError;

/// The most characters of a courier's name, and of a number.
const TEXT_CHARS_MAX: usize = 100;

fn check(shipment: &Shipment) -> Result<(), JobError> {
    let is_text = |text: &str| {
        let is_short = text.chars().count() <= TEXT_CHARS_MAX;
        is_short && !text.trim().is_empty() && !text.chars().any(char::is_control)
    };
    if !is_text(&shipment.courier) || !is_text(&shipment.number) {
        let why = "a courier or a number of no characters, of more than 100, or of control \
                   characters";
        return Err(JobError::Shipment(why));
    }
    match shipment.arrives.is_some_and(|it| it < shipment.date) {
        true => Err(JobError::Shipment("an arrival before its departure")),
        false => Ok(()),
    }
}

impl Job {
    /// Refuses a parcel whose devices have left.
    pub(super) fn is_here(&self) -> Result<(), JobError> {
        match &self.copier.document.shipped {
            None => Ok(()),
            Some(shipment) => Err(JobError::Shipped {
                parcel: self.copier.document.name.clone(),
                shipment: Box::new(shipment.clone()),
            }),
        }
    }

    /// Notes the journey of the devices. A later note replaces an earlier one.
    ///
    /// # Errors
    /// When the parcel is not sealed, or a disk was added since.
    pub fn ship(&mut self, shipment: Shipment) -> Result<(), JobError> {
        let _lock = self.lock()?;
        check(&shipment)?;
        if !self.copier.document.sealed {
            return Err(JobError::NotSealed(self.copier.document.name.clone()));
        }
        self.has_all()?;
        self.copier.document.shipped = Some(shipment);
        self.copier.save()
    }

    /// Takes the note back: the devices are here.
    ///
    /// # Errors
    /// When there is none.
    pub fn cancel_shipment(&mut self) -> Result<Shipment, JobError> {
        let _lock = self.lock()?;
        let shipment = self.copier.document.shipped.take();
        let shipment =
            shipment.ok_or_else(|| JobError::NotShipped(self.copier.document.name.clone()))?;
        self.copier.save()?;
        Ok(shipment)
    }
}
